"""A search with Optuna in which each run of a sweep is a trial: TPE chooses its values, bad trials end early.

The study is a file next to the runs. Trials may be on different nodes at the same time, and resume like any run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

import hpctrain
from hpctrain import BaseHook, StopReason, TorchTask

optuna.logging.set_verbosity(optuna.logging.WARNING)  # not a line for each process that opens the study


def open_study(path: str) -> optuna.Study:
    """The study in a file on a shared disk; the lock is a file next to it, which also works on NFS."""
    storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
    return optuna.create_study(
        storage=storage,
        study_name="sweep",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(constant_liar=True),  # trials run side by side
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )


def trial_of_run(study: optuna.Study, number: int) -> optuna.Trial:
    """The trial of run ``number`` of the sweep; a run that resumes finds its own again."""
    for trial in study.get_trials(deepcopy=False):
        if trial.user_attrs.get("run") == number:
            return optuna.Trial(study, trial._trial_id)
    new = study.ask()
    new.set_user_attr("run", number)
    return new


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The search space."""
    return {"lr": trial.suggest_float("lr", 1e-5, 1.0, log=True), "width": trial.suggest_int("width", 8, 128, log=True)}


class Reports(BaseHook):
    """Reports each evaluation to the study, and ends the run if the study prunes the trial."""

    def __init__(self, study: optuna.Study | None, trial: optuna.Trial | None) -> None:
        self.study = study
        self.trial = trial  # on rank 0
        self.loss = float("nan")

    def before_fit(self, training: Any) -> StopReason | None:
        pruned = self.trial is not None and self.study.trials[self.trial.number].state is TrialState.PRUNED
        return self.agreed(training, pruned)

    def after_eval(self, training: Any, metrics: Any) -> StopReason | None:
        self.loss, prune = metrics["loss"], False
        if self.trial is not None:
            self.trial.report(self.loss, training.state.step)
            prune = bool(self.trial.should_prune())
            if prune:
                self.study.tell(self.trial, state=TrialState.PRUNED)
        return self.agreed(training, prune)

    def after_fit(self, training: Any, reason: StopReason) -> None:
        if self.trial is not None and reason is StopReason.COMPLETED:  # a run that was stopped resumes with its trial
            self.study.tell(self.trial, self.loss)

    def agreed(self, training: Any, prune: bool) -> StopReason | None:
        return StopReason.EARLY if training.world.everyone.broadcast(prune, "hear whether to prune") else None


def waves(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Noisy samples of a function; replace them with your data."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-3, 3, (samples, 1)).astype(np.float32)
    return {"x": x, "y": (np.sin(2 * x) + rng.normal(0, 0.1, x.shape)).astype(np.float32)}


def task(world: hpctrain.World, trial: int, study: str = "study.log") -> TorchTask:
    """Build the task of one run; ``--task_args.trial 0,1,2`` gives each run of the sweep its number."""
    opened = open_study(study) if world.rank == 0 else None
    mine = trial_of_run(opened, trial) if opened else None
    values = world.everyone.broadcast(suggest(mine) if mine else None, "hear the values of the trial")
    width = values["width"]
    model = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    return TorchTask(
        model=model,
        loss="mse",
        optimizer=torch.optim.Adam(model.parameters(), lr=values["lr"]),
        train=waves(2048, seed=1),
        validation=waves(512, seed=2),
        hooks=[Reports(opened, mine)],
    )


if __name__ == "__main__":
    best = open_study("study.log").best_trial
    print(f"run {best.user_attrs['run']}: loss {best.value:.4f} with {best.params}")

"""Learning rates of whole runs: as asked for at every step, and the same after a resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.config.sections import (
    CheckpointConfig,
    Config,
    MonitorConfig,
    PlateauConfig,
    ReduceConfig,
    ScheduleConfig,
    TrainConfig,
)
from hpctrain.errors import UserError
from hpctrain.rank.fit import fit
from hpctrain.tasks.definition import TorchScheduler
from hpctrain.train.hooks import BaseHook, StopReason
from tests.tasks import scheduled_keras_tasks, scheduled_tasks

pytestmark = pytest.mark.usefixtures("environment_of_a_run")

STEPS = 20
"""Batches of 8 out of 40 samples: 5 an epoch."""
TASK = f"{scheduled_tasks.__file__}:task"
CONFIG = Config(
    name="run",
    task=TASK,
    train=TrainConfig(steps=STEPS, global_batch=8),
    reduce=ReduceConfig(kind="none"),
    checkpoint=CheckpointConfig(interval="none"),
    monitor=MonitorConfig(enabled=False),
)


class Rates(BaseHook):
    """Notes the rates, and the momentum, that each update used; ends the attempt at a step."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.used: dict[int, Any] = {}
        self.weights = ""
        self.framework: Any = None

    def before_fit(self, training: Any) -> None:
        self.framework = training.framework
        step = self.framework.step

        def noting_step(*arguments: Any) -> Any:
            groups = self.framework.optimizer.param_groups
            self.used[training.state.step] = [(group["lr"], group["betas"]) for group in groups]
            return step(*arguments)

        self.framework.step = noting_step

    def after_step(self, training: Any, result: Any) -> StopReason | None:
        return StopReason.REQUESTED if training.state.step == self.last else None

    def after_fit(self, training: Any, reason: StopReason) -> None:
        self.weights = training.framework.weights_hash()


def attempt(folder: Path, config: Config = CONFIG, last: int | None = None, schedule: str = "") -> Rates:
    """One attempt at a run in a folder."""
    rates = Rates(last)
    made = dataclasses.replace(config, run_dir=str(folder), task_args={"schedule": schedule})
    fit(made, hooks=[rates])
    return rates


def whole_and_resumed(folder: Path, config: Config = CONFIG, schedule: str = "") -> Rates:
    """A run that equals the one stopped at steps 7 and 13 and resumed."""
    whole = attempt(folder / "whole", config, schedule=schedule)
    used = {}
    for last in (7, 13, None):
        part = attempt(folder / "parts", config, last, schedule)
        used |= part.used
    assert used == whole.used and len(used) == STEPS
    assert part.weights == whole.weights
    return whole


@pytest.mark.parametrize(
    "schedule", [name for name in scheduled_tasks.MAKERS if "_by_" not in name and name != "not_one"]
)
def test_schedulers_of_torch_set_what_they_set_by_themselves_and_resume(schedule, tmp_path):
    whole = whole_and_resumed(tmp_path, schedule=schedule)
    if schedule == "plateau":  # follows the losses
        assert whole.used[0][0][0] > whole.used[STEPS - 1][0][0]
        return
    given = scheduled_tasks.MAKERS[schedule]
    optimizer = scheduled_tasks.task().optimizer
    scheduler = given.make(optimizer)
    for step in range(STEPS):
        assert whole.used[step] == [(group["lr"], group["betas"]) for group in optimizer.param_groups]
        optimizer.step()
        if given.every == "step" or step % 5 == 4:
            scheduler.step()


def test_a_function_of_the_step_gives_one_factor_or_one_for_each_group(tmp_path):
    one = whole_and_resumed(tmp_path / "one", schedule="function")
    assert [one.used[step][0][0] for step in range(3)] == pytest.approx([0.02, 0.01, 0.02 / 3])
    assert [one.used[step][1][0] for step in range(2)] == [0.01, 0.005]
    each = attempt(tmp_path / "each", schedule="function_of_groups")
    assert [group[0] for group in each.used[2]] == [0.02 * 0.9**2, 0.0]


class KerasRates(BaseHook):
    """Notes the rate after each update; ends the attempt at a step."""

    def __init__(self, last: int | None) -> None:
        self.last = last
        self.used: dict[int, float] = {}
        self.weights = ""

    def after_step(self, training: Any, result: Any) -> StopReason | None:
        self.used[training.state.step] = float(training.framework.task.optimizer.learning_rate)
        return StopReason.REQUESTED if training.state.step == self.last else None

    def after_fit(self, training: Any, reason: StopReason) -> None:
        self.weights = training.framework.weights_hash()


@pytest.mark.parametrize("schedule", ["keras", "function"])
def test_schedules_of_keras_are_resumed(schedule, tmp_path):
    task = f"{scheduled_keras_tasks.__file__}:task"
    config = dataclasses.replace(CONFIG, task=task, task_args={"schedule": schedule})
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=6))
    found = {}
    for name, last in (("whole", None), ("parts", 4), ("parts", None)):
        found[name] = KerasRates(last)
        fit(dataclasses.replace(config, run_dir=str(tmp_path / name)), hooks=[found[name]])
    assert found["whole"].weights == found["parts"].weights
    of_keras = {step: 0.02 * 0.5 ** (step / 3) for step in range(1, 7)}
    expected = of_keras if schedule == "keras" else {step: 0.02 / step for step in range(1, 7)}
    assert found["whole"].used == pytest.approx(expected)
    assert found["parts"].used == pytest.approx({step: expected[step] for step in (5, 6)})
    for other, message in (("groups", "Keras optimizer has one"), ("of_torch", "has a TorchScheduler")):
        with pytest.raises(UserError, match=message):
            fit(dataclasses.replace(config, run_dir=str(tmp_path / other), task_args={"schedule": other}))


def test_a_plateau_lowers_the_rate_and_is_resumed(tmp_path):
    plateau = PlateauConfig(patience=1, min_delta=1e9, factor=0.5, cooldown=1)
    config = dataclasses.replace(CONFIG, schedule=ScheduleConfig(kind="plateau", final_factor=0.3, plateau=plateau))
    config = dataclasses.replace(config, train=dataclasses.replace(CONFIG.train, eval_every_steps=2))
    whole = whole_and_resumed(tmp_path, config)
    factors = [whole.used[step][0][0] / 0.02 for step in range(STEPS)]
    # evaluations after steps 2, 4, 5, ...: the first is the best, the second lowers, the third is not counted
    assert factors[:4] == [1.0] * 4 and factors[4] == factors[5] == 0.5 and min(factors) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("schedule", "section", "message"),
    [
        ("function", ScheduleConfig(kind="cosine"), "both the run file's schedule and the task's"),
        ("not_one", ScheduleConfig(), r"TorchScheduler\(make\) returned int"),
        ("plateau_by_step", ScheduleConfig(), "ReduceLROnPlateau needs a metric"),
        ("ends_by_step_3", ScheduleConfig(), "OneCycleLR has total_steps=3, and the run has"),
        ("too_few_factors", ScheduleConfig(), "gives 1 factors for the 2 parameter groups"),
        ("", ScheduleConfig(kind="plateau", plateau=PlateauConfig(metric="f1")), "which the task does not report"),
    ],
)
def test_what_cannot_be_is_said(schedule, section, message, tmp_path):
    with pytest.raises(UserError, match=message):
        attempt(tmp_path, dataclasses.replace(CONFIG, schedule=section), schedule=schedule)


def test_state_of_another_scheduler_is_refused(tmp_path):
    from hpctrain.backends.torch.state.lr_scheduler import SchedulerHook

    def hook(scheduler):
        return SchedulerHook(TorchScheduler(scheduler), torch.optim.SGD([torch.zeros(1)], lr=1.0))

    saved = hook(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)).state_dict()
    del saved["groups"]
    with pytest.raises(UserError, match="does not fit StepLR"):
        hook(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)).load_state_dict(saved)


def test_a_scheduler_of_the_users_may_have_a_number_of_steps_and_go_on_after_it():
    from hpctrain.backends.torch.state.lr_scheduler import SchedulerHook

    class WarmUp(torch.optim.lr_scheduler.LambdaLR):
        total_steps = 3

    given = TorchScheduler(lambda optimizer: WarmUp(optimizer, lambda step: min(1, step / 3)))
    training: Any = SimpleNamespace(plan=SimpleNamespace(total_steps=9))
    SchedulerHook(given, torch.optim.SGD([torch.zeros(1)], lr=1.0)).before_fit(training)


def test_the_reported_factor_is_that_of_the_last_update(tmp_path):
    from tests.support.command import events

    config = dataclasses.replace(CONFIG, track=dataclasses.replace(CONFIG.track, every_steps=1))
    attempt(tmp_path, config, schedule="exponential")
    factors = [event["lr"] for event in events(tmp_path, "train")]
    assert factors == pytest.approx([0.7 ** (step // 5) for step in range(STEPS)])
    assert not any(math.isnan(factor) for factor in factors)


def test_a_longer_run_is_accepted_and_told(tmp_path, capfd):
    config = dataclasses.replace(CONFIG, schedule=ScheduleConfig(kind="linear"))
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=40))
    attempt(tmp_path, config)
    with pytest.raises(
        UserError, match=r"train\.steps was 20 and is 40 \(schedule.kind linear depends on the run's length"
    ):
        attempt(tmp_path, longer)
    accepted = dataclasses.replace(longer, checkpoint=CheckpointConfig(interval="none", accept=("train.epochs",)))
    rates = attempt(tmp_path, accepted)
    assert [rates.used[step][0][0] for step in (20, 30)] == pytest.approx([0.01, 0.005])
    assert "not the run that was saved, as accepted: train.steps was 20 and is 40" in capfd.readouterr().out
    attempt(tmp_path, longer)  # what is saved by now is the longer run

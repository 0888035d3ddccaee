"""Training on one rank: what ``hpctrain train`` does, as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from hpctrain.comm.world import World
from hpctrain.config.sections import Config, ReduceConfig
from hpctrain.data import Samples
from hpctrain.errors import RunFailed
from hpctrain.monitor.rank.session import start as start_monitor
from hpctrain.parallel.stage_choice import BY_PARAMETERS, StageChoice
from hpctrain.rank import wiring
from hpctrain.rank.problem import Problem, first_batch, make_problem, require_same_data
from hpctrain.rank.session import Outcome, PeerFailed, Session, attend
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.system.output import kept_output
from hpctrain.track.sink import Sink
from hpctrain.train.hooks import Hook
from hpctrain.train.in_step import in_step
from hpctrain.train.loop import RunSummary


def fit(
    config: Config,
    *,
    hooks: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    fresh: bool = False,
    verbose: bool = False,
) -> RunSummary:
    """Trains as ``hpctrain train`` does, with run folder, checkpoints, resume, monitor, stop requests and last words.

    This process is one rank: run the program by itself, or under mpirun or srun, where every rank makes this call. Call
    it from the main thread. While it trains, Ctrl-C, SIGTERM and the like save a checkpoint and end the run. On several
    ranks standard error, and standard output but rank 0's, go to the ranks' logs; where they went before is restored
    when training has ended well.

    Args:
        config: a run; see ``load_config``. Its task is imported from the module or file that it names.
        hooks: attached to the loop behind hpctrain's own; see ``Hook``. Their state is part of checkpoints.
        sinks: get the run's events; only rank 0's are used.
        fresh: put existing checkpoints aside and begin again.
        verbose: leave all output where it is, and let the libraries speak.

    Returns:
        How the attempt ended, and the last validation metrics. After a stop request (``StopReason.REQUESTED``) the same
        call resumes from the checkpoint that was saved.

    Raises:
        HpctrainError: what ended the run, the same on all ranks: ``UserError`` for something to correct first,
            ``NoRequeue`` if another attempt is pointless, ``RunFailed`` otherwise. Errors of the task's own code
            pass through on the rank where they arise.
    """
    summaries: list[RunSummary] = []

    def body(session: Session) -> Outcome:
        summary, outcome = train(session, config, hooks, sinks, fresh)
        summaries.append(summary)
        return outcome

    with kept_output():
        error = attend(body, verbose, raises=True).error
        if isinstance(error, PeerFailed):
            raise RunFailed(str(error), "see that rank's message, or its log in the run folder") from error
        if error is not None:
            raise error
    return summaries[0]


def train(
    session: Session, config: Config, hooks: Sequence[Hook] = (), sinks: Sequence[Sink] = (), fresh: bool = False
) -> tuple[RunSummary, Outcome]:
    """From the configuration to the end of the loop; collective."""
    run_dir = session.join_run(config)
    session.arrange(config)
    with session.phase("make the task"):
        problem = make_problem(config, session.world)
    require_same_data(problem, session.world)
    with ExitStack() as stack:
        monitor = stack.enter_context(closing(start_monitor(session.world, run_dir.path, config.monitor)))
        choice = reducer_choice(config.reduce, session.world, run_dir, session.warn)
        stages = stage_choice(problem, config, session, run_dir) if config.parallel.pipeline > 1 else BY_PARAMETERS
        framework = wiring.make_framework(config, session.world, problem.task, monitor.clock, choice, stages)
        stack.enter_context(closing(framework))
        with session.phase("try the task on one batch"):
            batch = first_batch(problem, config, session.world)
            validation = wiring.first_validation(config, session.world, problem)
            for one, _ in in_step([batch] if batch else [], framework.meeting):
                framework.dry_call(one, validation)
        data = stack.enter_context(closing(wiring.make_data(config, session.world, problem, framework)))
        attached = wiring.make_hooks(config, session, run_dir, problem, monitor, hooks, sinks, fresh, data)
        for hook in attached:
            stack.enter_context(closing(hook))
        trainer = wiring.make_trainer(config, session.world, problem, framework, monitor.clock, attached, data)
        summary = trainer.fit()
        return summary, Outcome(summary.reason, summary.step, framework.weights_hash())


def reducer_choice(config: ReduceConfig, world: World, run_dir: RunDir, warn: Callable[[str], object]) -> ReducerChoice:
    """An automatic choice of the reducer is made once in a run, for the same grid of ranks, and kept. Collective."""
    remembered = Remembered("reducer", "measures its reducers", world, run_dir, warn)
    kept = remembered.choice().get("reducer")
    return ReducerChoice(config, world, kept, lambda choice: remembered.note(choice.to_event()))


def stage_choice(problem: Problem, config: Config, session: Session, run_dir: RunDir) -> StageChoice:
    """The same for how layers are shared out among stages. Collective."""
    remembered = Remembered("stages", "times its layers", session.world, run_dir, session.warn)

    def batch() -> Samples:
        with session.phase("read the batch that layers are timed on"):
            return first_batch(problem, config, session.world)

    def record(layers: Sequence[int], seconds: Sequence[float]) -> None:
        remembered.note({"layers": list(layers), "seconds": [round(each, 6) for each in seconds]})

    return StageChoice(batch, remembered.choice().get("layers", ()), record)


@dataclass(frozen=True)
class Remembered:
    """A choice that run.json keeps for later attempts."""

    name: str
    """Of its field there."""
    does_again: str
    """What a resumed run does if it is lost, for people."""
    world: World
    run_dir: RunDir
    warn: Callable[[str], object]

    @property
    def grid(self) -> dict[str, int]:
        """That it was made for."""
        return {"ranks": self.world.size, "tensor": self.world.tensor.size, "pipeline": self.world.pipeline.size}

    def choice(self) -> dict[str, Any]:
        """Of an earlier attempt with the same grid; empty if there is none. Collective."""
        saved = (Attempts(self.run_dir).info().get(self.name) or {}) if self.world.rank == 0 else {}
        saved = self.world.everyone.broadcast(saved, f"learn the {self.name} of the earlier attempt")
        return saved if {"tensor": 1, "pipeline": 1, **saved}.items() >= self.grid.items() else {}

    def note(self, choice: Mapping[str, Any]) -> None:
        """On rank 0."""
        if self.world.rank == 0:
            try:
                Attempts(self.run_dir).update(**{self.name: {**self.grid, **choice}})
            except RunFailed as error:
                self.warn(f"{error.what}; training continues, a resumed run {self.does_again} again")

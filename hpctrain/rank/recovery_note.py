"""Reports what a failed attempt cost, at the first step of the next attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from hpctrain.errors import HpctrainError
from hpctrain.run import last_words
from hpctrain.run.attempts import Attempts
from hpctrain.run.event_log import stored_events_at_end
from hpctrain.run.events import Event, Recovered, TakeOver
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import current_attempt
from hpctrain.run.verdict import Action, RunVerdict
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, Training


@dataclass(frozen=True)
class Loss:
    """A failed attempt, or several in a row without progress."""

    verdict: RunVerdict
    since: float
    """Unix seconds of the first death or error, if known; else of the attempt's end."""
    reached: int
    """Highest step that it is known to have reached."""

    def recovered(self, first_step: int, now: float, began_at: int) -> Recovered:
        """Returns the event for the next attempt's first step.

        Args:
            first_step: that step.
            now: Unix seconds.
            began_at: step from which the next attempt resumed.
        """
        why = self.verdict
        repeated = max(0, self.reached - began_at)
        return Recovered(
            step=first_step,
            time=now,
            rank=why.rank,
            host=why.host,
            code=why.code.value,
            reason=why.reason,
            seconds=max(0.0, now - self.since),
            repeated_steps=repeated,
        )


def loss_before(run_dir: RunDir, number: int) -> Loss | None:
    """Returns the failure of the attempt before ``number``; None if it did not fail, or failed for good.

    An attempt that failed before its first step counts as part of the failure before it.

    Raises:
        OSError: the run folder cannot be read.
        UserError: run.json is damaged.
    """
    before = next((each for each in reversed(Attempts(run_dir).all()) if each.number < number), None)
    if before is None or before.verdict is None or not before.verdict.is_failure:
        return None
    if before.verdict.action is Action.FAIL:
        return None
    words = last_words.read(run_dir, before.number)
    ranks = words.ranks if words else ()
    times = [noted.at for noted in last_words.noted_deaths(run_dir, before.number)]
    times += [word.ended for word in ranks if word.ended is not None]
    began = [before.from_step or 0]
    steps = [before.to_step or 0, *(word.step or 0 for word in ranks)]
    for path in (run_dir.events, run_dir.monitor_events):
        for event in stored_events_at_end(path):
            if event.attempt == before.number:
                (began if isinstance(event, TakeOver) else steps).append(event.step)
    end = before.ended if before.ended is not None else before.started or 0.0
    reached = max(began + steps)
    first = None if reached > max(began) else loss_before(run_dir, before.number)
    if first is not None:
        return replace(first, reached=max(first.reached, reached))
    return Loss(before.verdict, min([*times, end]), reached)


class RecoveryNote(BaseHook):
    """Reports one ``recovered`` event, on rank 0, if the attempt before this one failed.

    Args:
        run_dir: the run folder.
        report: called with the event.
    """

    def __init__(self, run_dir: RunDir, report: Callable[[Event], object]) -> None:
        self.run_dir = run_dir
        self.report = report
        self.loss: Loss | None = None
        self.began_at = 0

    def before_fit(self, training: Training) -> None:
        self.began_at = training.state.step
        if training.world.rank == 0:
            with suppress(HpctrainError, OSError):  # a missing report must not end the run
                self.loss = loss_before(self.run_dir, current_attempt())

    def after_step(self, training: Training, result: StepResult) -> None:
        if self.loss is not None:
            self.report(self.loss.recovered(training.state.step, time.time(), self.began_at))
            self.loss = None

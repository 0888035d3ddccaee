"""The vote of a step: all that ranks must agree on between two steps, in one collective that costs the step nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from hpctrain.comm.group import TIMEOUT_S, Group


@dataclass(frozen=True)
class SaveVote:
    """About the save that is in flight in one place. An idle saver has finished, and is sound."""

    finished: bool = False
    """Whether all ranks have finished the save's current stage."""
    sound: bool = False
    """Whether all ranks have finished it without an error."""
    due: bool = False
    """Whether any rank says that the next save is due."""

    @classmethod
    def on(cls, work: Future[Any] | None, due: bool = False) -> SaveVote:
        """This rank's vote on a stage's work in the background; None if there is none."""
        done = work is None or work.done()
        return cls(done, done and (work is None or work.exception() is None), due)


@dataclass(frozen=True)
class StepVote:
    """What one rank says, or what all have agreed on. By default nothing is asked for, and no save has finished."""

    stop: int = 0
    """Largest number of any rank: not 0 if the run is to stop."""
    replaced: bool = False
    """Whether any rank has found a newer attempt."""
    checkpoint: SaveVote = SaveVote()
    tiers: tuple[SaveVote, ...] = ()
    """For each snapshot tier."""
    store: SaveVote = SaveVote()
    store_away: bool = False
    """Whether any rank cannot reach the object store."""
    batch: int = 0
    """This rank's number for the global batch, not negative; -1 if ranks have different ones."""

    def begin(self, group: Group, what: str, timeout_s: float = TIMEOUT_S) -> Callable[[], StepVote]:
        """Starts a vote; all ranks of the group do, with the same number of tiers.

        Returns a function that waits for the vote and returns what all agreed on. See ``Group.begin_min``.
        """
        saves = [[one.finished, one.sound, -int(one.due)] for one in (self.checkpoint, self.store, *self.tiers)]
        any_rank = [-self.stop, -int(self.replaced), -int(self.store_away)]  # the least negative is the largest
        bounds = [self.batch, -self.batch]
        least = group.begin_min(np.array([*any_rank, *bounds, *chain(*saves)], np.int64), what, timeout_s)

        def agreed() -> StepVote:
            stop, replaced, store_away, low, high, *numbers = least().tolist()
            checkpoint, store, *tiers = (SaveVote(*map(bool, numbers[i : i + 3])) for i in range(0, len(numbers), 3))
            batch = low if low == -high else -1
            return StepVote(-stop, bool(replaced), checkpoint, tuple(tiers), store, bool(store_away), batch)

        return agreed


class Ballot:
    """Collects this rank's votes during a step. The loop starts the vote when the next step has its batch, and whoever
    needs the result reads it after that step, when all messages have long arrived.

    Args:
        group: all ranks. Each casts the same fields at the same step.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.mine = self.last = StepVote()
        self.pending: Callable[[], StepVote] | None = None

    def cast(self, **fields: Any) -> None:
        """Sets fields of this rank's vote in this step."""
        self.mine = replace(self.mine, **fields)

    def begin(self, batch: int = 0) -> None:
        """Starts the vote, in a step on this global batch. Collective."""
        self.agreed()
        self.cast(batch=batch)
        self.pending, self.mine = self.mine.begin(self.group, "agree on the next step"), StepVote()

    def agreed(self) -> StepVote:
        """The result of the vote that was started last. Collective."""
        if self.pending:
            self.last, self.pending = self.pending(), None
        return self.last

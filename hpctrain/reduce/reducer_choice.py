"""Which reducer a run gets: the one that it names, the one that an earlier attempt chose, or the fastest one here.

Candidates take turns in rehearsals: forward, backward and exchange on real data without an update, after which the
model is as before. So what is trained never depends on what was measured, only on the choice; and a run that keeps its
choice on resume ends with the same bits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.reduce.candidates import Candidate


class Closable(Protocol):
    """A reducer, as far as the choice is concerned."""

    def close(self) -> None:
        """Ends its threads and frees its memory."""


R = TypeVar("R", bound=Closable)
R_co = TypeVar("R_co", bound=Closable, covariant=True)


class Reducers(Protocol[R_co]):
    """A framework's part in the choice, for one model."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        """What may be chosen from, best guess first. Collective.

        Raises:
            UserError: the configuration asks for what is not there.
        """

    def open(self, candidate: Candidate, group: Group) -> R_co:
        """The reducer of a candidate. Collective over the group."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    candidate: Candidate
    seconds: dict[str, float]
    """Median time of a rehearsed step by candidate, on the slowest rank."""

    def to_event(self) -> dict[str, str | dict[str, float]]:
        """JSON-able, for the run folder."""
        return {
            "reducer": self.candidate.name,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }


@dataclass(frozen=True)
class ReducerChoice:
    """How the reducer of a run is chosen."""

    config: ReduceConfig
    """The run file's section."""
    world: World
    """The ranks, which all make the same calls."""
    kept: str | None = None
    """Name of the candidate that an earlier attempt chose; used without measuring."""
    record: Callable[[Choice], object] | None = None
    """Called with what was measured, if there was a choice."""

    def known(self, reducers: Reducers[R]) -> R | None:
        """The reducer, or None if it has to be measured. Collective.

        Raises:
            UserError: the reducer that the configuration names cannot be used.
        """
        among = reducers.possible(self.config, self.world)
        if len(among) == 1:
            return reducers.open(among[0], self.world.data)
        return None if self.kept is None else reducers.open(Candidate.parse(self.kept), self.world.data)

    def measured(self, reducers: Reducers[R], rehearse: Callable[[R], object]) -> R:
        """The fastest reducer. Collective.

        Args:
            reducers: of the model.
            rehearse: runs forward, backward and exchange once with the reducer it gets, and leaves the model as it was.
        """
        group = self.world.data
        among = reducers.possible(self.config, self.world)
        choice = choose(among, Rehearsal(reducers, group, rehearse), self.world.everyone)
        if self.record is not None:
            self.record(choice)
        return reducers.open(choice.candidate, group)

    def reducer(self, reducers: Reducers[R], rehearse: Callable[[R], object]) -> R:
        """The reducer that is known, else the fastest one; arguments as those of ``measured``. Collective."""
        return self.known(reducers) or self.measured(reducers, rehearse)


@dataclass
class ChosenReducer(Generic[R]):
    """The reducer in use. If it has to be measured, that is done on the batch of the first update."""

    possible: Reducers[R]
    """Among which there is a choice."""
    choice: ReducerChoice
    unchanged: Callable[[], AbstractContextManager[None]]
    """A context in which rehearsals leave no trace."""
    used: R | None
    """None while there is a choice."""

    def measured(self, rehearse: Callable[[R], object]) -> R:
        """The reducer in use, which the first call may have to find by rehearsals of a step. Collective."""
        if self.used is None:
            with self.unchanged():
                self.used = self.choice.measured(self.possible, rehearse)
        return self.used

    def use(self, choice: ReducerChoice) -> None:
        """Sums as this choice says, whose reducer is known. Collective."""
        self.close()
        self.choice = choice
        self.used = choice.known(self.possible)

    def close(self) -> None:
        """Ends its threads and frees its memory."""
        if self.used is not None:
            self.used.close()
            self.used = None


PASSES = 3
MOST_RUNS = 8
BUDGET_S = 10.0
HOPELESS = 1.6
"""Times the fastest from which on a candidate has no second turn: the others are measured the longer."""
QUICK_S = 2.0
"""No candidate is hopeless where all turns of all of them take less: one run of milliseconds may be a hiccup's."""
ADVANTAGE = 0.02
"""A later candidate has to be this much faster than an earlier one to be taken in its place."""


class Turns(Protocol):
    """Steps without an update, one candidate at a time."""

    def open(self, candidate: Candidate) -> None:
        """Makes the candidate ready."""

    def run(self) -> None:
        """Forward, backward, exchange; returns when the sums are there."""

    def close(self) -> None:
        """Ends the candidate's threads and frees its memory."""


class Rehearsal(Generic[R]):
    """Turns of a framework's reducers."""

    def __init__(self, reducers: Reducers[R], group: Group, step: Callable[[R], object]) -> None:
        self.reducers, self.group, self.step = reducers, group, step
        self.reducer: R | None = None

    def open(self, candidate: Candidate) -> None:
        self.reducer = self.reducers.open(candidate, self.group)

    def run(self) -> None:
        assert self.reducer is not None, "open comes first"
        self.step(self.reducer)

    def close(self) -> None:
        assert self.reducer is not None, "open comes first"
        self.reducer.close()


def choose(
    among: Sequence[Candidate], rehearsal: Turns, group: Group, now: Callable[[], float] = time.perf_counter
) -> Choice:
    """Measures the candidates in turns and returns one choice on every rank: the least maximum over ranks of medians.

    Collective over the group. Takes fifteen seconds at most, or two steps of each candidate if those are slower.
    """
    kept: dict[str, list[float]] = {}
    left, runs = list(among), 1
    for turn in range(PASSES if len(among) > 1 else 0):
        times = {candidate.name: rehearse(candidate, rehearsal, 1 + runs, now) for candidate in left}
        for name, seconds in times.items():
            kept.setdefault(name, []).extend(seconds[1:])  # the first run makes ready
        if turn == 0:
            # The better one of both runs, where the first one does not compile.
            least = slowest_rank(group, {name: min(seconds) for name, seconds in times.items()})
            if (PASSES - 1) * (1 + MOST_RUNS) * sum(least.values()) > QUICK_S:
                left = [candidate for candidate in among if least[candidate.name] < HOPELESS * min(least.values())]
            turn_s = max(sum(least[candidate.name] for candidate in left), 1e-6)
            runs = min(MOST_RUNS, int(BUDGET_S / (PASSES - 1) / turn_s) - 1)
            if runs < 1 or len(left) == 1:
                break
    medians = slowest_rank(group, {name: statistics.median(seconds) for name, seconds in kept.items()})
    return Choice(fastest(left, medians), medians)


def rehearse(candidate: Candidate, rehearsal: Turns, runs: int, now: Callable[[], float]) -> list[float]:
    """Seconds of each of a candidate's steps in one turn."""
    rehearsal.open(candidate)
    times = []
    for _ in range(runs):
        begin = now()
        rehearsal.run()
        times.append(now() - begin)
    rehearsal.close()
    return times


def slowest_rank(group: Group, seconds: dict[str, float]) -> dict[str, float]:
    """The maximum over ranks of each time; collective."""
    everywhere = group.allgather(seconds, "compare reducers")
    return {name: max(rank[name] for rank in everywhere) for name in seconds}


def fastest(among: Sequence[Candidate], seconds: dict[str, float]) -> Candidate:
    """The first candidate that no later one beats clearly."""
    best = among[0]
    for candidate in among[1:]:
        if seconds[candidate.name] < seconds[best.name] * (1 - ADVANTAGE):
            best = candidate
    return best

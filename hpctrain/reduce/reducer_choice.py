"""Chooses a run's reducer: the one it names, the one an earlier attempt chose, or the fastest one measured.

Candidates take turns in rehearsals: forward, backward and exchange on real data without an update, after which the
model is unchanged. Training therefore depends only on the choice, not on the timings, and a resumed run that keeps its
choice gives bitwise identical results.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.reduce.candidates import Candidate


class Closable(Protocol):
    """A reducer, as far as choosing one is concerned."""

    def close(self) -> None:
        """Ends the reducer's threads and frees its memory."""


R = TypeVar("R", bound=Closable)
R_co = TypeVar("R_co", bound=Closable, covariant=True)


class ReducerFactory(Protocol[R_co]):
    """What a framework contributes to the choice, for one model."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        """The possible candidates, best guess first. Collective.

        Raises:
            UserError: the configuration asks for something that does not work here.
        """

    def open(self, candidate: Candidate, group: Group) -> R_co:
        """Opens a candidate's reducer. Collective over the group."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    candidate: Candidate
    seconds: dict[str, float]
    """Median time of a rehearsed step on the slowest rank, by candidate."""

    def to_event(self) -> dict[str, str | dict[str, float]]:
        """The choice as JSON-able values, for the run folder."""
        return {
            "reducer": self.candidate.name,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }


@dataclass(frozen=True)
class ReducerChoice:
    """How the reducer of a run is chosen."""

    config: ReduceConfig
    """The run file's reduce section."""
    world: World
    """All ranks; all make the same calls."""
    kept: str | None = None
    """Name of the candidate that an earlier attempt chose; used without measuring."""
    record: Callable[[Choice], object] | None = None
    """Called with the result if candidates were measured."""

    def known(self, factory: ReducerFactory[R]) -> R | None:
        """Opens the reducer if it need not be measured; otherwise returns None. Collective.

        Raises:
            UserError: the reducer named in the configuration cannot be used.
        """
        among = factory.possible(self.config, self.world)
        if len(among) == 1:
            return factory.open(among[0], self.world.data)
        return None if self.kept is None else factory.open(Candidate.parse(self.kept), self.world.data)

    def measured(self, factory: ReducerFactory[R], rehearse: Callable[[R], object]) -> R:
        """Measures the candidates and opens the fastest one. Collective.

        Args:
            factory: opens the model's reducers.
            rehearse: runs forward, backward and exchange once with the given reducer, and leaves the model as it was.
        """
        group = self.world.data
        among = factory.possible(self.config, self.world)
        choice = choose(among, lambda one: factory.open(one, group), rehearse, self.world.everyone)
        if self.record is not None:
            self.record(choice)
        return factory.open(choice.candidate, group)

    def reducer(self, factory: ReducerFactory[R], rehearse: Callable[[R], object]) -> R:
        """Opens the known reducer, or else the fastest one; arguments as for ``measured``. Collective."""
        return self.known(factory) or self.measured(factory, rehearse)


@dataclass
class ChosenReducer(Generic[R]):
    """The reducer in use. If it has to be measured, that happens on the first update's batch."""

    factory: ReducerFactory[R]
    """Opens what may be chosen."""
    choice: ReducerChoice
    unchanged: Callable[[], AbstractContextManager[None]]
    """A context that undoes what rehearsals change."""
    used: R | None
    """None until one has been chosen."""

    def chosen(self, rehearse: Callable[[R], object]) -> R:
        """The reducer in use; the first call may have to choose it by rehearsing steps. Collective."""
        if self.used is None:
            with self.unchanged():
                self.used = self.choice.measured(self.factory, rehearse)
        return self.used

    def use(self, choice: ReducerChoice) -> None:
        """Switches to this choice, which needs no measuring. Collective."""
        self.close()
        self.choice = choice
        self.used = choice.known(self.factory)

    def close(self) -> None:
        """Ends the reducer's threads and frees its memory."""
        if self.used is not None:
            self.used.close()
            self.used = None


LEAST_TURNS, MOST_TURNS = 2, 6
"""Turns of all candidates after the first one; more than the least only while turns name different winners."""
LEAST_RUNS, MOST_RUNS = 3, 8
"""Runs of a candidate in a turn, besides the first one, which is a warm-up."""
BUDGET_S = 12.0
HOPELESS = 1.6
"""Candidates slower than the fastest by this factor get only one turn, so that the others get more runs."""
QUICK_S = 2.0
"""If the least turns take less than this, no candidate is dropped: a hiccup can distort runs of milliseconds."""
ADVANTAGE = 0.02
"""Fraction by which a later candidate must be faster to be preferred to an earlier one."""

Runs = Mapping[str, Sequence[float]]
"""Seconds of runs by candidate, on the slowest rank. Equal indices are runs of the same turn."""


def choose(
    among: Sequence[Candidate],
    open_reducer: Callable[[Candidate], R],
    step: Callable[[R], object],
    group: Group,
    now: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Measures the candidates in turn and returns the same choice on every rank: the one that no other clearly beats.

    On a node that other jobs use, speed changes from turn to turn. So runs are compared with runs of the same turn, by
    the median of their differences; turns go forth and back; and there are more of them unless all have the same
    winner. Collective over the group. Takes at most fifteen seconds, or two steps of each candidate if these are slow.
    """

    def turn(candidates: Sequence[Candidate], runs: int) -> Runs:
        times = {one.name: rehearse(open_reducer(one), step, 1 + runs, now) for one in candidates}
        return slowest_rank(group, times)

    if len(among) == 1:
        return Choice(among[0], {})
    first = turn(among, 1)
    least = {name: min(seconds) for name, seconds in first.items()}  # the first run may include compilation
    left = worth_more_turns(among, least)
    turn_s = max(sum(least[candidate.name] for candidate in left), 1e-6)
    runs = max(LEAST_RUNS, min(MOST_RUNS, int(BUDGET_S / MOST_TURNS / turn_s) - 1))
    most_turns = min(MOST_TURNS, int(BUDGET_S / (turn_s * (1 + runs)))) if len(left) > 1 else 0
    turns = [warm(first)]
    winners: list[Candidate] = []
    for number in range(most_turns):
        order = left[::-1] if number % 2 else left
        turns.append(warm(turn(order, runs)))
        winners.append(fastest(left, turns[-1]))
        agree = len(winners) >= LEAST_TURNS and len(set(winners)) == 1
        if agree or sum(map(sum, joined(turns).values())) > BUDGET_S:
            break
    everything = joined(turns)
    return Choice(fastest(left, everything), {name: statistics.median(runs) for name, runs in everything.items()})


def worth_more_turns(among: Sequence[Candidate], least: Mapping[str, float]) -> Sequence[Candidate]:
    """The candidates that are not hopelessly slow, given the shortest run of each."""
    if LEAST_TURNS * (1 + MOST_RUNS) * sum(least.values()) <= QUICK_S:
        return among
    return [candidate for candidate in among if least[candidate.name] < HOPELESS * min(least.values())]


def warm(turn: Runs) -> Runs:
    """A turn without each candidate's first run, which warms it up."""
    return {name: seconds[1:] for name, seconds in turn.items()}


def rehearse(reducer: R, step: Callable[[R], object], runs: int, now: Callable[[], float]) -> list[float]:
    """Duration in seconds of each step in one turn with a reducer, which is closed at its end."""
    times = []
    for _ in range(runs):
        begin = now()
        step(reducer)
        times.append(now() - begin)
    reducer.close()
    return times


def slowest_rank(group: Group, seconds: Runs) -> Runs:
    """Maximum over ranks of each run. Collective."""
    everywhere = group.allgather(seconds, "compare reducers")
    of_ranks = {name: zip(*(rank[name] for rank in everywhere), strict=True) for name in seconds}
    return {name: list(map(max, runs)) for name, runs in of_ranks.items()}


def joined(turns: Sequence[Runs]) -> Runs:
    """The runs of all turns."""
    return {name: [run for turn in turns for run in turn.get(name, ())] for name in turns[0]}


def lead(one: Candidate, other: Candidate, runs: Runs) -> float:
    """By which fraction of the other's time a candidate is faster, by the median difference of paired runs."""
    ours, theirs = runs[one.name], runs[other.name]
    return statistics.median(b - a for a, b in zip(ours, theirs, strict=True)) / statistics.median(theirs)


def fastest(among: Sequence[Candidate], runs: Runs) -> Candidate:
    """The first candidate that no later one clearly beats."""
    best = among[0]
    for candidate in among[1:]:
        if lead(candidate, best, runs) > ADVANTAGE:
            best = candidate
    return best

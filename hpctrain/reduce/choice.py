"""Which way of summing gradients is fastest here: measured on the real model, before the first update.

Candidates take turns in rehearsals: forward, backward and exchange on real data without an update, after which the
model is as before. So what is trained never depends on what was measured, only on the choice; and a run that keeps its
choice on resume ends with the same bits.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import UserError
from hpctrain.reduce.shm_allreduce import FOLDER

Way = Literal["node", "ring", "flat", "overlap"]


@dataclass(frozen=True)
class Candidate:
    """One way of summing gradients over ranks."""

    kind: Literal["none", "mpi", "horovod"]
    way: Way = "flat"
    """node: through shared memory; ring: the same, and between nodes by a ring of our own; flat: one message after
    backward; overlap: buckets during backward."""
    compression: Literal["none", "fp16", "bf16"] = "none"

    @property
    def name(self) -> str:
        """Such as ``mpi-node`` or ``horovod-overlap-fp16``."""
        if self.kind == "none":
            return "none"
        return f"{self.kind}-{self.way}" + ("" if self.compression == "none" else f"-{self.compression}")

    @classmethod
    def parse(cls, name: str) -> Candidate:
        """The candidate of a name; raises ValueError where there is none."""
        known = {candidate.name: candidate for candidate in EVERY_CANDIDATE}
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
        return known[name]


EVERY_CANDIDATE = (
    Candidate("none"),
    *(
        Candidate(kind, way, compression)
        for kind in ("mpi", "horovod")
        for way in ("node", "ring", "flat", "overlap")
        for compression in ("none", "fp16", "bf16")
        if (way not in ("node", "ring") or (kind, compression) == ("mpi", "none"))
        and (kind, way, compression) not in {("mpi", "overlap", "fp16"), ("mpi", "overlap", "bf16")}
        and (kind, compression) != ("horovod", "bf16")
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """What decides which candidates there are."""

    ranks: int
    nodes: int
    shared_memory: bool
    """Whether ranks of a node can share memory."""
    horovod: bool
    """Whether Horovod is there, works, and uses the same MPI."""
    gpu: bool
    """Whether gradients lie on a GPU."""


def look_around(config: ReduceConfig, world: World, gpu: bool, has_horovod: Callable[[], bool]) -> Surroundings:
    """What all ranks have; equal on them, also where nodes differ, or they would make different calls. Collective.

    Args:
        config: the run file's section.
        world: the ranks.
        gpu: whether this rank's gradients lie on a GPU.
        has_horovod: whether Horovod works here; asked only where it may be chosen.
    """
    group = world.data
    shares = world.local_size > 1 and os.path.isdir(FOLDER)
    horovod = group.size > 1 and config.kind == "auto" and has_horovod()
    everywhere = group.allgather([shares, horovod, gpu], "compare what gradients could be summed with")
    shared_memory, horovod, gpu = (all(column) for column in zip(*everywhere, strict=True))
    return Surroundings(group.size, world.nodes, shared_memory, horovod, gpu)


def candidates(config: ReduceConfig, around: Surroundings) -> list[Candidate]:
    """What may be chosen from, best guess first. An explicit kind gives one: what it does then never depends on timing.

    Raises:
        UserError: the configuration asks for what is not there.
    """
    if around.ranks == 1:
        return [Candidate("none")]
    if config.kind == "none":
        raise UserError(
            f"reduce.kind is none but there are {around.ranks} ranks, which would train apart",
            "set reduce.kind: auto, or start one rank",
        )
    if config.kind == "horovod" and config.compression == "bf16":
        raise UserError("Horovod cannot sum bfloat16", "set reduce.compression: fp16, or reduce.kind: mpi")
    ways = [_horovod(config, around)] if config.kind == "horovod" else [_mpi(config, around)]
    if config.kind == "auto":
        ways = _every_way(config, around)
    squeezed: tuple[Literal["none", "fp16", "bf16"], ...]
    squeezed = ("none", "fp16") if config.compression == "auto" else (config.compression,)
    found = [Candidate(way.kind, way.way, compression) for way in ways for compression in squeezed]
    return [candidate for candidate in dict.fromkeys(map(_feasible, found))]


def _mpi(config: ReduceConfig, around: Surroundings) -> Candidate:
    if config.overlap == "on":
        return Candidate("mpi", "overlap")
    return Candidate("mpi", "node" if around.shared_memory and config.compression == "none" else "flat")


def _horovod(config: ReduceConfig, around: Surroundings) -> Candidate:
    overlaps = config.overlap == "on" or (config.overlap == "auto" and (around.gpu or around.nodes > 1))
    return Candidate("horovod", "overlap" if overlaps else "flat")


def _every_way(config: ReduceConfig, around: Surroundings) -> list[Candidate]:
    overlaps, waits = config.overlap != "off", config.overlap != "on"
    horovod = around.horovod and config.compression != "bf16"
    ways = [
        (Candidate("mpi", "node"), waits and around.shared_memory),
        (Candidate("mpi", "ring"), waits and around.nodes > 1),
        (Candidate("mpi", "flat"), waits and (around.nodes > 1 or not around.shared_memory)),
        (Candidate("mpi", "overlap"), overlaps and around.nodes > 1),
        (Candidate("horovod", "overlap"), overlaps and horovod),
        (Candidate("horovod", "flat"), waits and horovod),
    ]
    return [way for way, possible in ways if possible] or [_mpi(config, around)]


def _feasible(candidate: Candidate) -> Candidate:
    """Compressed sums over MPI are formed after backward, from messages between all ranks."""
    if candidate.kind == "mpi" and candidate.compression != "none":
        return Candidate("mpi", "flat", candidate.compression)
    return candidate


class Rehearsal(Protocol):
    """Steps without an update, one candidate at a time."""

    def open(self, candidate: Candidate) -> None:
        """Makes the candidate ready."""

    def run(self) -> None:
        """Forward, backward, exchange; returns when the sums are there."""

    def close(self) -> None:
        """Ends the candidate's threads and frees its memory."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    candidate: Candidate
    seconds: dict[str, float]
    """Median time of a rehearsed step by candidate, on the slowest rank."""

    def to_event(self) -> dict[str, Any]:
        """JSON-able, for the run folder."""
        return {
            "reducer": self.candidate.name,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }


PASSES = 3
MOST_RUNS = 8
BUDGET_S = 10.0
HOPELESS = 1.6
"""Times the fastest from which on a candidate has no second turn: the others are measured the longer."""
ADVANTAGE = 0.02
"""A later candidate has to be this much faster than an earlier one to be taken in its place."""


def choose(
    among: Sequence[Candidate], rehearsal: Rehearsal, group: Group, now: Callable[[], float] = time.perf_counter
) -> Choice:
    """Measures the candidates in turns and returns one choice on every rank: the least maximum over ranks of medians.

    Collective over the group. Takes fifteen seconds at most, or two steps of each candidate where those are slower.
    """
    kept: dict[str, list[float]] = {}
    left, runs = list(among), 1
    for turn in range(PASSES if len(among) > 1 else 0):
        times = {candidate.name: rehearse(candidate, rehearsal, 1 + runs, now) for candidate in left}
        for name, seconds in times.items():
            kept.setdefault(name, []).extend(seconds[1:])  # the first run makes ready
        if turn == 0:
            # The better one of both runs: a hiccup drops no candidate.
            least = slowest_rank(group, {name: min(seconds) for name, seconds in times.items()})
            left = [candidate for candidate in among if least[candidate.name] < HOPELESS * min(least.values())]
            turn_s = max(sum(least[candidate.name] for candidate in left), 1e-6)
            runs = min(MOST_RUNS, int(BUDGET_S / (PASSES - 1) / turn_s) - 1)
            if runs < 1 or len(left) == 1:
                break
    medians = slowest_rank(group, {name: statistics.median(seconds) for name, seconds in kept.items()})
    return Choice(fastest(left, medians), medians)


def rehearse(candidate: Candidate, rehearsal: Rehearsal, runs: int, now: Callable[[], float]) -> list[float]:
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

"""Contenders of the step benchmark take turns on the ranks that run it. Knows no framework."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hpctrain.comm.group import Group

WARMUP_STEPS = 3


class Contender(Protocol):
    """One way of training; the models of all start with the same weights."""

    def step(self) -> None:
        """One update."""

    def weights_hash(self) -> str:
        """Of the model's weights, to compare between ranks."""

    def close(self) -> None:
        """Leaves nothing running that could slow the next."""


def take_turns(
    contenders: Sequence[str], make: Callable[[str], Contender], rounds: int, steps: int, group: Group
) -> tuple[dict[str, float], dict[str, bool]]:
    """Median seconds of a step on the slowest rank, and whether all ranks ended with the same weights, by contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    equal = dict.fromkeys(contenders, True)
    for _ in range(rounds):
        for name in contenders:
            contender = make(name)
            times[name] += timed(contender, steps, group)
            equal[name] &= len(set(group.allgather(contender.weights_hash(), "compare weights"))) == 1
            contender.close()
    mine = {name: statistics.median(values) for name, values in times.items()}
    everywhere = group.allgather(mine, "collect the times")
    return {name: max(rank[name] for rank in everywhere) for name in contenders}, equal


def timed(contender: Contender, steps: int, group: Group) -> list[float]:
    """Seconds of each step, after some that are not counted."""
    for _ in range(WARMUP_STEPS):
        contender.step()
    group.barrier("begin together")
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        contender.step()
        times.append(time.perf_counter() - begin)
    return times

"""Runs trials with slowdowns injected into healthy traces, and counts how often the monitor is right."""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.straggler.traces import Trace, resampled, simulated, slowed, slowed_processor
from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.chief.chief import Chief
from hpctrain.monitor.chief.finding import FindingState, Kind
from hpctrain.monitor.chief.judge import Judge
from hpctrain.monitor.chief.slowness import COMPUTE
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node.node import window_message
from hpctrain.monitor.window import CAUSES, Window
from hpctrain.run.folder import RunDir
from hpctrain.train.clock import Phase

WINDOW = 32
HORIZON = 256
"""Steps after the onset within which a finding counts."""
CALM = 8 * WINDOW
"""Healthy steps before the earliest onset."""
ACCUSING = (Kind.RANK, Kind.HOST, Kind.PAUSES)
WHERE = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CALLBACKS, Phase.CHECKPOINT, None)
"""Phases that are slowed; None slows all of them equally."""

Source = Callable[[int, int, np.random.Generator], Trace]
"""Makes a healthy trace of a number of ranks and steps."""


@dataclass(frozen=True)
class Accusation:
    """A rank that was named."""

    rank: int
    cause: str
    window: int


Detector = Callable[[Iterator[Window], int], list[Accusation]]


@dataclass(frozen=True)
class Cell:
    """All trials with one kind of slowdown."""

    ranks: int
    where: str
    share: float
    trials: int
    right_rank: float
    """Fraction of trials in which only the slow rank was named, within the horizon."""
    right_cause: float
    """Fraction of trials in which its cause was right, within the horizon."""
    innocents: int
    """Number of healthy ranks that were named."""
    latency_p50: float
    """Median steps from the onset to the end of the confirming window."""
    latency_p95: float


def monitor(windows: Iterator[Window], ranks: int) -> list[Accusation]:
    """The monitor's rule."""
    judge = Judge([f"n{rank}" for rank in range(ranks)])
    return [
        Accusation(rank, verdict.cause, window.index)
        for window in windows
        for verdict in judge.judge(window)
        if verdict.state is FindingState.CONFIRMED and verdict.kind in ACCUSING
        for rank in verdict.ranks
    ]


def on_step_times(windows: Iterator[Window], ranks: int) -> list[Accusation]:
    """The monitor's rule on step times, which cannot work since all ranks wait for the slowest one."""
    return monitor((replace(window, busy=window.busy + window.wait) for window in windows), ranks)


def by_rule(slow: Callable[[NDArray[np.floating]], NDArray[np.bool_]]) -> Detector:
    """Makes a detector from a rule on median busy times; two windows in a row confirm, as in the monitor."""

    def detect(windows: Iterator[Window], ranks: int) -> list[Accusation]:
        found, before, named = [], np.zeros(ranks, dtype=bool), set()
        for window in windows:
            now = slow(np.median(window.busy, axis=1))
            for rank in np.flatnonzero(now & before).tolist():
                if rank not in named:
                    named.add(rank)
                    found.append(Accusation(rank, "", window.index))
            before = now
        return found

    return detect


DETECTORS: dict[str, Detector] = {
    "hpctrain": monitor,
    "the same on step times": on_step_times,
    "ratio to the fastest < 0.75": by_rule(lambda m: m.min() / m < 0.75),
    "mean + 3 sigma": by_rule(lambda m: m > m.mean() + 3 * m.std()),
    "2 x median": by_rule(lambda m: m > 2 * np.median(m)),
}


def from_recorded(recorded: Trace) -> Source:
    """Healthy traces from blocks of a recorded run."""
    return lambda ranks, steps, rng: resampled(recorded, ranks, steps, rng)


def from_simulation(ranks: int, steps: int, rng: np.random.Generator) -> Trace:
    """Healthy traces with lognormal noise of 5% and 1% of steps that take twice as long."""
    return simulated(ranks, steps, rng)


def run_cell(
    source: Source, ranks: int, where: Phase | None, share: float, trials: int, seed: int, detector: Detector = monitor
) -> Cell:
    """Runs trials of one kind: a random rank becomes slow at a random step and stays slow."""
    rng = np.random.default_rng([seed, ranks, len(Phase) if where is None else int(where), round(1000 * share)])
    right_rank = right_cause = innocents = 0
    latencies = []
    expected = COMPUTE if where is None else CAUSES[where]
    for _ in range(trials):
        rank, onset = int(rng.integers(ranks)), CALM + int(rng.integers(2 * WINDOW))
        trace = source(ranks, onset + HORIZON + WINDOW, rng)
        bad = slowed_processor(trace, rank, share, onset) if where is None else slowed(trace, rank, where, share, onset)
        named = detector(bad.windows(WINDOW), ranks)
        innocents += len({accusation.rank for accusation in named} - {rank})
        mine = [accusation for accusation in named if accusation.rank == rank]
        if not mine:
            continue
        latency = (mine[0].window + 1) * WINDOW - onset
        in_time = 0 < latency <= HORIZON
        latencies.append(latency)
        right_rank += in_time and len({accusation.rank for accusation in named}) == 1
        right_cause += in_time and mine[0].cause == expected
    p50, p95 = np.percentile(latencies, [50, 95]) if latencies else (float("nan"),) * 2
    return Cell(
        ranks,
        "all phases" if where is None else expected,
        share,
        trials,
        right_rank / trials,
        right_cause / trials,
        innocents,
        float(p50),
        float(p95),
    )


def healthy(source: Source, ranks: int, rank_windows: int, seed: int) -> dict[str, Any]:
    """Counts false confirmations over many healthy windows."""
    rng = np.random.default_rng([seed, ranks])
    windows = named = done = 0
    while done < rank_windows:
        trace = source(ranks, 100 * WINDOW, rng)
        named += len(monitor(trace.windows(WINDOW), ranks))
        windows += 100
        done += 100 * ranks
    return {"ranks": ranks, "rank_windows": done, "false_confirmations": named}


def compare(source: Source, ranks: int, share: float, trials: int, seed: int) -> list[dict[str, Any]]:
    """Runs all detectors on the same trials, over all phases."""
    rows = []
    for name, detector in DETECTORS.items():
        cells = [run_cell(source, ranks, where, share, trials, seed, detector) for where in WHERE]
        latencies = [cell.latency_p95 for cell in cells if np.isfinite(cell.latency_p95)]
        rows.append(
            {
                "share": share,
                "detector": name,
                "found": float(np.mean([cell.right_rank for cell in cells])),
                "blames_for_a_fast_rank": blames_for_a_fast_rank(source, ranks, trials, seed, detector),
                "innocents_per_trial": sum(cell.innocents for cell in cells) / (trials * len(cells)),
                "latency_p95": max(latencies, default=float("nan")),
            }
        )
    return rows


def blames_for_a_fast_rank(source: Source, ranks: int, trials: int, seed: int, detector: Detector) -> float:
    """Ranks named per trial in which one rank is 30% faster than the others and none is slow."""
    rng = np.random.default_rng([seed, ranks])
    named = 0
    for _ in range(trials):
        trace = slowed_processor(source(ranks, CALM + HORIZON, rng), int(rng.integers(ranks)), -0.3, 0)
        named += len(detector(trace.windows(WINDOW), ranks))
    return named / trials


def cost(ranks: int, windows: int = 10) -> dict[str, Any]:
    """Measures seconds and memory of a window on the first node: decoding all nodes' messages and judging."""
    pair = list(simulated(ranks, 2 * WINDOW, np.random.default_rng(0)).windows(WINDOW))
    seconds, sent = first_node(pair, windows)
    tracemalloc.start()
    first_node(pair, windows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"ranks": ranks, "seconds_per_window": seconds, "peak_bytes": peak, "window_bytes": sent}


def first_node(pair: list[Window], windows: int, ranks_per_node: int = 8) -> tuple[float, int]:
    """Median seconds of the first node per window, and the bytes of its messages."""
    nodes = [rank // ranks_per_node for rank in range(len(pair[0].ranks))]
    seconds, sent = [], 0
    with tempfile.TemporaryDirectory() as folder:
        RunDir(Path(folder)).monitor.mkdir()
        chief = Chief([f"n{node}" for node in nodes], nodes, RunDir(Path(folder)), 1, MonitorConfig(), lambda *_: None)
        for index in range(windows):
            frames = [message.encode() for message in reports(replace(pair[index % 2], index=index), ranks_per_node)]
            sent = sum(map(len, frames))
            begin = time.perf_counter()
            for frame in frames:
                chief.receive(Message.decode(frame), 0.0)
            seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)), sent


def reports(window: Window, ranks_per_node: int) -> Iterator[Message]:
    """Messages with a window, as the nodes send them."""
    for first in range(0, len(window.ranks), ranks_per_node):
        part = slice(first, first + ranks_per_node)
        names = ("busy", "wait", "work", "typical", "mean")
        arrays = {name: getattr(window, name)[part] for name in names}
        yield window_message(Window(index=window.index, ranks=window.ranks[part], **arrays))


def as_json(cells: list[Cell]) -> list[dict[str, Any]]:
    """Converts cells for --json."""
    return [asdict(cell) for cell in cells]

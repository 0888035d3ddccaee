"""Overhead of the monitor per step: it is switched on and off in alternating blocks within one process."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from hpctrain.comm.world import alone
from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.rank_monitor import start
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.train.clock import IntervalClock, Phase

STEP_S = 0.02
BLOCK = 20
BLOCKS = 60


def compute(times: int) -> int:
    total = 0
    for number in range(times):
        total += number
    return total


def additions_in(seconds: float) -> int:
    best = 0.0
    for _ in range(10):
        begin = time.perf_counter()
        compute(100_000)
        best = max(best, 100_000 / (time.perf_counter() - begin))
    return int(best * seconds)


class NoClock(IntervalClock):
    """Marks nothing."""

    def mark(self, phase: Phase) -> None:
        """Do nothing."""


def block(clock: object, work: int) -> float:
    """Median seconds of a step in one block."""
    seconds = []
    for _ in range(BLOCK):
        begin = time.perf_counter()
        for phase in Phase:
            compute(work // len(Phase))
            clock.mark(phase)  # type: ignore[attr-defined]
        clock.end_step(1.0)  # type: ignore[attr-defined]
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))


def test_the_monitor_costs_less_than_one_per_cent_of_20_ms_steps(tmp_path):
    work = additions_in(STEP_S)
    with start(alone(), tmp_path, MonitorConfig(on_hang="report", host_interval_s=1.0)) as monitor:
        assert monitor.agent is not None
        nothing = NoClock()
        block(monitor.clock, work)
        ratios = []
        for index in range(BLOCKS):
            pair = {}
            for on in (index % 2 == 0, index % 2 == 1):
                os.kill(monitor.agent.pid, signal.SIGCONT if on else signal.SIGSTOP)
                pair[on] = block(monitor.clock if on else nothing, work)
            ratios.append(pair[True] / pair[False] - 1)
        os.kill(monitor.agent.pid, signal.SIGCONT)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    print(f"overhead {np.median(ratios):+.3%}, upper 95% bound {np.percentile(medians, 95):+.3%}")
    assert np.percentile(medians, 95) < 0.01


def test_the_clock_of_a_step_costs_less_than_ten_microseconds():
    clock = RingClock()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(2000):
            for phase in Phase:
                clock.mark(phase)
            clock.end_step(1.0)
        best = min(best, (time.perf_counter() - begin) / 2000)
    assert best < 10e-6

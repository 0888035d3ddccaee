"""The phase clock and its shared memory: what was marked is what is read, at the price of microseconds."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.monitor import shared
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.monitor.shared import (
    MARKED_AT,
    MARKED_PHASE,
    NO_PHASE,
    PID,
    STEPS,
    WAITS_FOR,
    RingLayout,
    Slot,
    SlotReader,
)
from hpctrain.monitor.window import GC, REST, WORK, condense
from hpctrain.train.clock import IntervalClock, Neighbours, Phase
from tests.support.mpi import PATIENCE_S

CLOCKS = [
    (RingClock, "hpctrain.monitor.ring_clock.monotonic"),
    (IntervalClock, "hpctrain.train.clock.time.perf_counter"),
]
LAYOUT = RingLayout(ranks=3, rows=64)


@pytest.fixture
def memory() -> Iterator[int]:
    handle, path = shared.create(LAYOUT)
    os.unlink(path)
    yield handle
    os.close(handle)


def clock_on(memory: int, local_rank: int) -> RingClock:
    slot = Slot(shared.map_memory(memory, LAYOUT), LAYOUT, local_rank)
    slot.join()
    return RingClock(slot)


def step(clock: RingClock, work: float = 1.0) -> None:
    for phase in Phase:
        clock.mark(phase)
    clock.end_step(work)


@pytest.mark.parametrize(("kind", "time_of"), CLOCKS)
def test_a_wait_in_the_middle_of_a_phase_is_not_the_phases(kind, time_of, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time_of, lambda: now[0])
    clock = kind()
    for seconds in (3.0, 4.0):  # two sums in one phase
        now[0] += 1.0
        clock.begin_wait(Neighbours.TENSOR)
        now[0] += seconds
        clock.end_wait()
    now[0] += 0.5
    clock.mark(Phase.FORWARD)
    now[0] += 0.25
    clock.mark(Phase.BACKWARD)
    taken = clock.take()
    assert (taken["forward"], taken["backward"], taken["exchange"]) == (2.5, 0.25, 7.0)


def test_who_waits_for_whom_is_in_the_shared_memory(memory):
    clock, reader, begin = clock_on(memory, 1), SlotReader.of(memory, LAYOUT), time.monotonic()
    clock.mark(Phase.TO_DEVICE)
    clock.begin_wait(Neighbours.TENSOR)
    head = reader.heads()[1]
    assert (head[WAITS_FOR], head[MARKED_PHASE]) == (Neighbours.TENSOR, Phase.TO_DEVICE)
    assert begin <= head[MARKED_AT] <= time.monotonic()
    clock.end_wait()
    assert reader.heads()[1][WAITS_FOR] == Neighbours.NOBODY


def test_marks_are_read_as_seconds_of_their_phase(memory, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hpctrain.monitor.ring_clock.monotonic", lambda: now[0])
    clocks = [clock_on(memory, local_rank) for local_rank in range(3)]
    for _ in range(8):
        for clock in clocks:
            for phase in Phase:
                now[0] += 1 + phase
                clock.mark(phase)
            now[0] += 0.5
            clock.end_step(32)
            for other in clocks:
                other.last = now[0]
    rows = SlotReader.of(memory, LAYOUT).totals(2, 6)
    assert rows is not None
    window = condense(0, np.arange(3), rows)
    np.testing.assert_allclose(window.wait, 1 + Phase.EXCHANGE)
    np.testing.assert_allclose(window.busy, sum(1 + phase for phase in Phase if phase != Phase.EXCHANGE) + 0.5)
    np.testing.assert_allclose(window.typical[:, Phase.DATA], 1)
    np.testing.assert_allclose(window.typical[:, REST], 0.5)
    np.testing.assert_allclose(window.work, 32)


def test_what_follows_the_exchange_delays_the_next_arrival():
    """busy(k) = arrival(k) - exit(k - 1): the optimizer of step k - 1 belongs to step k."""
    steps = np.zeros((1, 5, REST + 7))
    steps[0, 2, Phase.OPTIMIZER] = 7.0
    steps[0, 2, Phase.DATA] = 1.0
    window = condense(0, np.array([0]), np.cumsum(steps, axis=1))
    assert window.busy.tolist() == [[1.0, 7.0, 0.0]]


def test_before_the_first_step_totals_are_zero(memory):
    clock = clock_on(memory, 0)
    for _ in range(4):
        step(clock)
    rows = SlotReader.of(memory, LAYOUT).totals(-2, 6)
    assert rows is not None
    assert (rows[:, :2] == 0).all()
    assert rows[0, 2:, WORK].tolist() == [1, 2, 3, 4]


def test_rows_that_are_overwritten_are_not_given(memory):
    clock, reader = clock_on(memory, 1), SlotReader.of(memory, LAYOUT)
    for _ in range(100):
        step(clock)
    assert reader.totals(30, 10) is None
    assert reader.totals(60, 34) is not None


def test_a_rank_that_has_only_joined_is_not_silent(memory):
    begin = time.monotonic()
    clock_on(memory, 0)
    assert SlotReader.of(memory, LAYOUT).heads()[0, MARKED_AT] >= begin


def test_the_heartbeat_says_who_and_where(memory):
    clock, reader = clock_on(memory, 2), SlotReader.of(memory, LAYOUT)
    clock.mark(Phase.FORWARD)
    assert reader.heads()[2, MARKED_PHASE] == Phase.FORWARD
    clock.end_step()
    head = reader.heads()[2]
    assert (head[PID], head[STEPS], head[MARKED_PHASE]) == (os.getpid(), 1, NO_PHASE)


def test_a_loop_of_ones_own_marks_phases_by_name(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hpctrain.monitor.ring_clock.monotonic", lambda: now[0])
    clock = RingClock()
    with clock.phase("data"):
        now[0] += 2
    now[0] += 10
    with clock.phase("forward"):
        pass
    clock.arrived()
    now[0] += 3
    clock.left()
    taken = clock.take()
    assert (taken["data"], taken["exchange"], taken["forward"]) == (2, 3, 0)
    assert clock.totals[REST] == 10
    assert sum(clock.take().values()) == 0


def test_collections_are_timed_and_let_go():
    clock = RingClock()
    before = list(gc.callbacks)
    clock.watch_gc()
    gc.collect()
    clock.unwatch_gc()
    assert clock.totals[GC] > 0
    assert gc.callbacks == before


@pytest.mark.slow
def test_memory_stays_flat_over_a_million_steps():
    clock = RingClock()
    for _ in range(1000):
        step(clock)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1_000_000):
        step(clock)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024, "KiB"


def test_a_console_that_is_gone_does_not_end_a_run_that_the_monitor_speaks_of():
    code = """
import os, subprocess, sys
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.monitor.rank_monitor import MonitorSession
agent = subprocess.Popen(["echo", "rank 1 is slow"], stdout=subprocess.PIPE)
agent.wait()
gone, console = os.pipe()
os.close(gone)
os.dup2(console, 1)
MonitorSession(RingClock(), agent, None).poll()
os._exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, stderr=subprocess.DEVNULL).returncode == 7


def test_a_phase_that_ended_earlier_ends_neither_before_the_last_mark_nor_later_than_now(
    monkeypatch,
):
    now = [100.0]
    monkeypatch.setattr("hpctrain.monitor.ring_clock.monotonic", lambda: now[0])
    clock = RingClock()
    now[0] += 10.0
    clock.mark_past(Phase.BACKWARD, 4.0)
    assert clock.take()["backward"] == pytest.approx(6.0)
    clock.mark_past(Phase.BACKWARD, 50.0)
    assert clock.take()["backward"] == 0.0
    clock.mark_past(Phase.BACKWARD, -50.0)
    clock.mark(Phase.OPTIMIZER)
    assert clock.take() == pytest.approx(dict.fromkeys(clock.take(), 0.0) | {"backward": 4.0})

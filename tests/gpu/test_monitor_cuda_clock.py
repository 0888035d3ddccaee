"""Phases on a GPU: queued work counts in the phase in which the device runs it, and marking never synchronizes."""

import time

import pytest

from hpctrain.monitor.ring_clock import RingClock
from hpctrain.train.clock import Neighbours, Phase

pytestmark = pytest.mark.gpu
CYCLES_PER_MS = 1_500_000


def test_phases_are_as_long_as_the_device_works_and_marks_do_not_wait():
    torch = pytest.importorskip("torch")
    from hpctrain.backends.torch.device import follow_device

    clock = RingClock()
    follow_device(clock, torch.device("cuda", 0))
    torch.cuda._sleep(1)  # the first call loads the kernel, which takes longer than the rest of the test
    torch.cuda.synchronize()
    clock.mark(Phase.DATA)  # time before the test
    began = time.perf_counter()
    for _ in range(5):
        torch.cuda._sleep(2 * CYCLES_PER_MS)
        clock.mark(Phase.FORWARD)
        torch.cuda._sleep(8 * CYCLES_PER_MS)
        clock.mark(Phase.BACKWARD)
        clock.end_step(32)
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    worked = time.perf_counter() - began
    assert queued < 0.5 * worked
    clock.mark(Phase.DATA)
    torch.cuda.synchronize()
    clock.end_step(32)
    torch.cuda.synchronize()
    clock.end_step(32)
    assert clock.published >= 5
    assert clock.totals[Phase.BACKWARD] == pytest.approx(4 * clock.totals[Phase.FORWARD], rel=0.1)
    assert clock.totals[Phase.FORWARD] + clock.totals[Phase.BACKWARD] == pytest.approx(worked, rel=0.2)


def test_a_wait_on_the_host_is_not_the_phases():
    """As in the sum of a tensor-parallel layer: its input was copied to the host, so the device is idle."""
    torch = pytest.importorskip("torch")
    from hpctrain.backends.torch.device import follow_device

    clock = RingClock()
    follow_device(clock, torch.device("cuda", 0))
    for _ in range(5):
        torch.cuda._sleep(2 * CYCLES_PER_MS)
        torch.cuda.synchronize()
        clock.begin_wait(Neighbours.TENSOR)
        time.sleep(0.02)  # the wait itself
        clock.end_wait()
        torch.cuda._sleep(2 * CYCLES_PER_MS)
        clock.mark(Phase.FORWARD)
        clock.end_step(32)
    torch.cuda.synchronize()
    clock.end_step(32)
    assert clock.totals[Phase.EXCHANGE] == pytest.approx(0.1, rel=0.3)
    assert clock.totals[Phase.FORWARD] < 0.06

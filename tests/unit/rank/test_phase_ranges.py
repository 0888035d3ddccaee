"""Phases in a profile of PyTorch."""

from __future__ import annotations

import json

import pytest
import torch

from hpctrain.backends.torch.performance import TorchProfiler
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.rank.phase_ranges import PhaseProfiler
from hpctrain.train.clock import Phase

pytestmark = pytest.mark.slow


def a_step(clock: RingClock) -> None:
    """A step without an exchange, whose backward pass is a product of matrices."""
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        if phase is Phase.BACKWARD:
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        clock.mark(phase)
    clock.end_step()


def test_ranges_have_the_names_of_phases_and_the_clock_goes_on(tmp_path):
    clock = RingClock()
    profiler = PhaseProfiler(TorchProfiler(), clock)
    a_step(clock)
    profiler.start(tmp_path / "rank-0")
    for _ in range(3):
        a_step(clock)
    profiler.stop()
    a_step(clock)
    assert clock.published == 5
    trace = json.loads((tmp_path / "rank-0.pt.trace.json").read_text())["traceEvents"]
    ranges = sorted((event for event in trace if event.get("cat") == "user_annotation"), key=lambda event: event["ts"])
    names = [event["name"] for event in ranges if event["name"] in {phase.name.lower() for phase in Phase}]
    assert names[-5:] == ["data", "forward", "backward", "optimizer", "data"]
    products = [event for event in trace if event.get("name") == "aten::mm"]
    last = max(products, key=lambda event: event["ts"])
    [around] = [one for one in ranges if one["ts"] <= last["ts"] < one["ts"] + one["dur"] and one["name"] in names]
    assert around["name"] == "backward"


def test_a_profile_that_is_given_up_leaves_the_clock_alone(tmp_path):
    clock = RingClock()
    before = clock.mark
    profiler = PhaseProfiler(TorchProfiler(), clock)
    profiler.start(tmp_path / "rank-0")
    assert clock.mark != before
    profiler.abandon()
    assert clock.mark == before

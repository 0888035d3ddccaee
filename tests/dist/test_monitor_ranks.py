"""The monitor on real ranks with real exchanges; their work is a timed wait, so that two cores suffice."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.run.run_view import RunView

PROGRAM = Path(__file__).parent / "programs" / "monitored_loop.py"

pytestmark = pytest.mark.alone


def run(mpirun: Callable[..., Any], ranks: int, folder: Path, **script: Any) -> tuple[list[dict[str, Any]], Any]:
    """Run the loop; return its monitor's events and its output."""
    result = mpirun(ranks, PROGRAM, folder, json.dumps(script))
    events = folder / "monitor" / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    assert (folder / "monitor" / "agent-0.log").read_text() == ""
    return [json.loads(line) for line in lines], result


def confirmed(events: list[dict[str, Any]]) -> list[tuple[str, int | None, str]]:
    return [(event["kind"], event["rank"], event["cause"]) for event in events if event.get("state") == "confirmed"]


@pytest.mark.world_size(4)
def test_each_slow_phase_is_found_and_clears(mpirun, tmp_path):
    phases = ("data", "forward", "backward", "optimizer", "callbacks", "checkpoint")
    slow = [[i % 4, phase, 0.004, 50 + 140 * i, 50 + 140 * i + 60] for i, phase in enumerate(phases)]
    events, result = run(mpirun, 4, tmp_path, steps=80 + 140 * len(phases), slow=slow)
    assert confirmed(events) == [("rank", i % 4, phase) for i, phase in enumerate(phases)]
    for rank in range(4):  # each incident ends, on a busy machine possibly after the next one begins elsewhere
        incidents = sum(victim == rank for victim, *_ in slow)
        states = [event["state"] for event in events if event["rank"] == rank]
        assert states == ["confirmed", "cleared"] * incidents, events
    assert "rank 1 on" in result.stdout and "slower than its peers: the forward pass, which costs" in result.stdout


@pytest.mark.world_size(8)
def test_two_culprits_of_eight(mpirun, tmp_path):
    slow = [[2, "data", 0.006, 60, 400], [5, "backward", 0.005, 60, 400]]
    events, _ = run(mpirun, 8, tmp_path, steps=260, slow=slow)
    assert set(confirmed(events)) >= {("rank", 2, "data"), ("rank", 5, "backward")}
    assert {event["rank"] for event in events if event["kind"] == "rank"} == {2, 5}
    heat = RunView(tmp_path).heat_map()
    assert heat is not None and heat.shape[0] == 8 and np.nanmax(heat[[2, 5]]) > 0.1
    live = json.loads((tmp_path / "monitor" / "live.json").read_text())
    assert len(live["ranks"]) == 8 and len(live["verdicts"]) >= 2


@pytest.mark.world_size(4)
def test_a_delayed_exchange_is_the_network_and_nobody_is_blamed(mpirun, tmp_path):
    events, _ = run(mpirun, 4, tmp_path, steps=240, exchange_delay=[0.006, 120])
    assert confirmed(events) == [("network", None, "network")]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("trouble", ["stop_agent", "kill_agent"])
def test_the_end_of_an_agent_does_not_touch_the_steps(mpirun, tmp_path, trouble):
    _, result = run(mpirun, 2, tmp_path, steps=300, trouble=trouble, victim=0)
    durations = json.loads(result.stdout.splitlines()[-1])["durations"]
    assert len(durations) == 300
    assert statistics.median(durations[60:]) < 1.2 * statistics.median(durations[5:40])

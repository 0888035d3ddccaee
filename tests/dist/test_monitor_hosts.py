"""The monitor across hosts with separate networks: its listening address, and reports from the other host."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "monitored_loop.py"

pytestmark = pytest.mark.alone


@pytest.mark.world_size(4)
def test_the_slow_rank_of_another_host_is_named(network, tmp_path):
    script = {"steps": 160, "slow": [[3, "data", 0.04, 40, 400]]}
    network.mpirun(2, PROGRAM, tmp_path, json.dumps(script), ranks_per_host=2)
    for node in range(2):
        assert (tmp_path / "monitor" / f"agent-{node}.log").read_text() == ""
    live = json.loads((tmp_path / "monitor" / "live.json").read_text())
    assert [rank["host"] for rank in live["ranks"]] == [name for name in network.names[:2] for _ in range(2)]
    events = [json.loads(line) for line in (tmp_path / "monitor" / "events.jsonl").read_text().splitlines()]
    found = [(event["rank"], event["host"], event["cause"]) for event in events if event["state"] == "confirmed"]
    assert (3, network.names[1], "data") in found

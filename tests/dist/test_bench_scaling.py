"""Tests of ``hpctrain bench scaling`` on this machine's ranks."""

import json

import pytest

from tests.support.command import hpctrain, write_run


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_a_run_at_two_sizes(tmp_path):
    run_file = write_run(
        tmp_path,
        task="hpctrain.tasks.torch_digits:task",
        train={"epochs": 1, "global_batch": 64},
        reduce={"kind": "mpi"},
    )
    words = ["bench", "scaling", run_file, "--ranks", "1,2", "--steps", 24, "--rounds", 1, "--json"]
    result = json.loads(hpctrain(*words, cwd=tmp_path, timeout=280, warm="torch").stdout)
    folder = tmp_path / "runs" / "run-scaling"
    assert json.loads((folder / "scaling.json").read_text()) == result
    assert "Efficiency" in (folder / "scaling.svg").read_text()
    assert result["parallel"]["shard"] == "none"
    assert result["parallel"]["tensor"] == result["parallel"]["pipeline"] == 1
    assert result["reducer"] == "mpi-node" and result["gradient_bytes"] > 1000
    weak, strong = result["modes"]["weak"], result["modes"]["strong"]
    assert [row["global_batch"] for row in weak["measured"]] == [64, 128]
    assert [row["global_batch"] for row in strong["measured"]] == [64, 64]
    assert weak["measured"][0] == strong["measured"][0]
    for row in (*weak["measured"], *strong["measured"]):
        parts = [row[f"{name}_s"] for name in ("compute", "exchange", "data", "rest")]
        assert 0 < row["step_s"] == pytest.approx(sum(parts))
    assert weak["recommendation"].startswith("weak scaling: ")
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*/events.jsonl")}
    again = hpctrain(*words, cwd=tmp_path)
    assert json.loads(again.stdout) == result and again.stderr == ""
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/events.jsonl")} == done, "nothing ran twice"


@pytest.mark.world_size(2)
def test_a_run_that_fails_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("def task():\n    raise ValueError('no such data')\n")
    run_file = write_run(tmp_path, task="broken.py:task", train={"steps": 1, "global_batch": 64})
    ended = hpctrain("bench", "scaling", run_file, "--ranks", "1", "--rounds", 1, cwd=tmp_path, code=70, warm="torch")
    assert "ranks-1-batch-64-round-1 ended with exit code" in ended.stderr and "no such data" in ended.stderr

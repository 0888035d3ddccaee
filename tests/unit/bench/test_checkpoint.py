"""The benchmark runs, and says what it should; memory does not grow from save to save."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_bench_checkpoint(tmp_path):
    pytest.importorskip("torch")
    options = ["--mb", "8", "--rounds", "1", "--saves", "20", "--folder", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "benchmarks.checkpoint", *options]  # hpctrain bench checkpoint, and contenders
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    rows = found["rows"]
    ratios = {row["what"]: row.get("speed_ratio") for row in rows}
    assert all(
        ratios[what] > 0
        for what in ("stall: hpctrain", "write: hpctrain", "read: hpctrain", "write: DCP async + fsync")
    )
    assert all(row["baseline_mb_per_s"] > 0 for row in rows if "baseline" in row)
    growth = found["beyond_one_copy_mb"].values()
    assert len(growth) == 2 and max(growth) <= 64, "a copy kept for each save would be 160 MB"
    assert list(tmp_path.iterdir()) == []

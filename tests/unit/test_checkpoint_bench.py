"""The benchmark runs, and says what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_bench_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = ["--mb", "8", "--rounds", "1", "--saves", "3", "--folder", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "hpctrain", "bench", "checkpoint", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    rows = json.loads(done.stdout.splitlines()[-1])
    ratios = {row["what"]: row.get("speed_ratio") for row in rows}
    assert all(
        ratios[what] > 0
        for what in ("stall: hpctrain", "write: hpctrain", "read: hpctrain", "write: DCP async + fsync")
    )
    assert sum(row["what"] == "memory" for row in rows) == 2
    assert list(tmp_path.iterdir()) == []

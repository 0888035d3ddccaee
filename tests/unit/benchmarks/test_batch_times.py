"""``benchmarks.straggler.batch_times`` on generated files in the format of the published ones."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.straggler.batch_times import named, read_trace, run
from hpctrain.errors import UserError

WORKERS, SAMPLES, EVERY = 10, 60, 10


def write(path: Path, slow: int | None) -> Path:
    """A row at every tenth step; one worker takes half as long again from the 20th to the 39th row."""
    rng = np.random.default_rng(0)
    lines = [",worker,gpu,time,batch_time_norm"]
    for sample in range(SAMPLES):
        for worker in range(WORKERS):
            factor = 1.5 if worker == slow and 20 <= sample < 40 else 1.0
            took = round(400 * factor * rng.normal(1, 0.02))
            lines.append(f"{len(lines) - 1},{worker},25,{1 + EVERY * sample},{took}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_worker_that_becomes_slow_is_named_and_cleared(tmp_path, capsys):
    file = write(tmp_path / "job_1_norm.csv", slow=6)
    slower, no_longer = named(read_trace(file))
    assert re.fullmatch(r"worker 6 (4[5-9]|5[0-5])% slower \(step 256\)", slower), "two windows from step 201 on"
    assert no_longer.startswith("worker 6 no longer")
    assert run(argparse.Namespace(files=[file])) == 0
    assert capsys.readouterr().out.startswith(f"job_1_norm.csv: {WORKERS} workers, {EVERY * (SAMPLES - 1)} steps: ")


def test_equal_workers_are_not_named(tmp_path):
    assert named(read_trace(write(tmp_path / "job_2_norm.csv", slow=None))) == []


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no worker, time, batch_time_norm"):
        read_trace(tmp_path / "x.csv")

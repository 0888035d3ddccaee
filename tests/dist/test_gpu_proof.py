"""env/gpu-proof also runs without a GPU: each kind of row, over gloo and MPI on the CPU."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_proof.launch import run_row
from benchmarks.gpu_proof.rows import ROWS
from tests.support.mpi import PATIENCE_S, rank_environment
from tests.support.warm_ranks import variables

ROOT = Path(__file__).parents[2]


ONE_OF_A_KIND = {"train-fp16", "exchange-device-2", "plan-parameters-2"}
"""Other rows of their kinds call the same functions; test_plans.py shows that plans are exact on CPUs."""
TRIED = [
    name
    for name in ROWS
    if name in ONE_OF_A_KIND or not (name.startswith(("train-", "exchange-", "plan-")) or name.endswith("-eager"))
]


JUDGE_TIMES = ["feed-pinned", "feed-prefetch", "monitor-clock"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tried",
    [
        pytest.param(JUDGE_TIMES, marks=pytest.mark.alone, id="times"),
        pytest.param([name for name in TRIED if name not in JUDGE_TIMES], id="numbers"),
    ],
)
def test_each_kind_of_row_is_right_on_a_cpu(tmp_path, tried):
    warm = variables("torch", rank_environment({"PYTHONPATH": str(ROOT)}))
    environment = {**os.environ, **warm, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = [ROOT / "env/gpu-proof", *tried, "--minutes", "9", "--output", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu-proof.json").read_text())
    assert [row["name"] for row in result["rows"]] == tried
    unlike = {row["name"]: row["reason"] for row in result["rows"] if row["status"] != "passed"}
    assert unlike == {name: "needs a GPU" for name in tried if name in ("devices-seen", "devices-fail-2")}
    page = (tmp_path / "gpu-proof.md").read_text()
    assert all(f"| {name} |" in page for name in tried)


def test_what_fails_or_hangs_costs_its_own_row(tmp_path):
    row = ROWS["monitor-clock"]
    unknown = run_row(dataclasses.replace(row, name="unknown"), tmp_path / "unknown", 60)
    assert (unknown.status, unknown.reason) == ("failed", "exit code 1: KeyError: 'unknown'")
    late = run_row(row, tmp_path / "late", 0.1)
    assert (late.status, late.reason) == ("failed", "no end within 0 s")


def test_it_starts_where_all_packages_are_lacking():
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_proof", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "--wheels DIR" in done.stdout

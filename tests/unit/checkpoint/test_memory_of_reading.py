"""Loading, verifying, exporting and initial weights read each byte once, and hold little beside what they fill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.command import PROJECT

MOST_MIB = 16.0


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_large_state_is_read_once_and_is_held_once(framework, tmp_path):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    command = [sys.executable, "-m", "tests.support.memory_of_reading", framework, str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[float, float]] = json.loads(done.stdout)
    assert found.keys() == {"load", "verify", "export", "init_from a checkpoint", "init_from a file"}
    for reader, (bytes_read, more_mib) in found.items():
        assert 1.0 <= bytes_read < 1.1, f"{reader} reads {bytes_read:.2f} times what it takes"
        assert more_mib < MOST_MIB, f"{reader} holds {more_mib:.1f} MiB more than that"


@pytest.mark.slow
def test_ranks_of_any_plan_read_what_they_hold_of_what_any_other_saved(tmp_path):
    """Columns of what was written by ranks that have rows, and rows of what was written by columns."""
    command = [sys.executable, "-m", "tests.support.memory_of_columns", str(tmp_path)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else malloc keeps what was freed before
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[float, float]] = json.loads(done.stdout)
    assert len(found) == 30
    for reader, (bytes_read, more_mib) in found.items():
        assert 0.999 <= bytes_read < 1.1, f"{reader} reads {bytes_read:.3f} times what it takes"
        assert 0.5 < more_mib < MOST_MIB, f"{reader} holds {more_mib:.1f} MiB more than that"


@pytest.mark.slow
def test_ranks_read_what_they_hold_of_few_tensors_and_of_5000(tmp_path):
    """At the plan that saved, at another, and whole."""
    command = [sys.executable, "-m", "tests.support.memory_of_plans", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[float, float, float]] = json.loads(done.stdout)
    assert len(found) == 10
    for reader, (bytes_read, more_mib, _) in found.items():
        assert 0.999 <= bytes_read < 1.1, f"{reader} reads {bytes_read:.3f} times what it takes"
        assert more_mib < MOST_MIB, f"{reader} holds {more_mib:.1f} MiB more than that"

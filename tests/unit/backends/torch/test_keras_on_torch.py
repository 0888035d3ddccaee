"""Keras tasks on PyTorch give the numbers of Keras' own ``fit``, without TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def shown(*words: str) -> Any:
    """What the program of ``tests.tasks.keras_on_torch`` prints; Keras has one backend in a process."""
    command = [sys.executable, "-m", "tests.tasks.keras_on_torch", *words]
    environment = os.environ | {"KERAS_BACKEND": "torch"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "leave out" not in ended.stdout + ended.stderr, "all state of the task is saved"
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_weights_and_metrics_are_those_of_fit():
    """The same operations in the same order give the same bits; ``evaluate`` adds up metrics in float32."""
    found = shown()
    assert len(found) > 7
    assert {case: one["weights"] for case, one in found.items()} == dict.fromkeys(found, 0.0)
    metrics = {f"{case}: {name}": value for case, one in found.items() for name, value in one["metrics"].items()}
    assert {name: value for name, value in metrics.items() if value > 1e-6} == {}
    assert found["two outputs"]["names"] == ["loss", "size_mae"]


@pytest.mark.slow
def test_files_of_keras_are_written_and_read(tmp_path):
    """Plain Keras loads the whole model; a run begins with weights from a file, and so do their averages."""
    assert shown(str(tmp_path)) == dict.fromkeys(("whole", "initial", "averages", "left", "half"), 0)

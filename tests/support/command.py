"""Running ``hpctrain`` from a test as a user does, and reading what it left."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpctrain.run_dir import RunDir
from tests.support import mpi

PROJECT = Path(__file__).parents[2]


def hpctrain(
    *words: object, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120, code: int | None = 0
) -> mpi.Result:
    """Runs the command; fails the test unless it ends with ``code`` (None: any)."""
    environment = mpi.rank_environment({"PYTHONPATH": str(PROJECT), **(env or {})})
    environment.pop("OMP_NUM_THREADS")  # the launcher's own business
    command = [sys.executable, "-m", "hpctrain", *map(str, words)]
    result = mpi.run_in_group(command, environment, cwd, timeout)
    if code is not None:
        assert result.returncode == code, f"exit {result.returncode}: {' '.join(command)}\n{result.output}"
    return result


def write_run(folder: Path, **keys: Any) -> Path:
    """A run file in a folder."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "run", **keys}))
    return path


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """Events of a name in a run folder."""
    return [event for event in RunDir(run).read_events() if event["event"] == name]


def last_words(run: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """Last words of all ranks, in their order."""
    words = json.loads((run / "ranks" / f"{attempt}.json").read_text())["ranks"]
    return sorted(words, key=lambda word: word["rank"])

"""Hostile input to hpctrain: folders that shadow modules, and run folders to set traps in."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.command import HPCTRAIN, environment
from tests.support.mpi import Result, run_in_group

SOMEBODY = 65534
"""Id of a user who is not root."""
PYTHONS_OWN = {"importlib", "antigravity", "this"}
"""Not shadowed: ``python -m`` imports the first before it looks for the package; the others are jokes."""


def shadow_the_standard_library(folder: Path) -> Path:
    """Shadow each standard library module with a file in a folder; return the file where they record that they ran."""
    told = folder / "ran.txt"
    here = {
        name for name in sys.stdlib_module_names - PYTHONS_OWN if importlib.util.find_spec(name)
    }  # excludes modules of other platforms
    for name in here:
        line = f"import os\nopen({str(told)!r}, 'a').write({name!r} + os.linesep)\nraise ImportError('not {name}')\n"
        (folder / f"{name}.py").write_text(line)
    return told


def as_somebody() -> list[str]:
    """Command prefix that runs a command as a user who is not root but may read all files."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return []
    ids = [f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups"]
    return ["setpriv", *ids, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def look(*words: object, env: Mapping[str, str] | None = None, timeout: float = 60) -> Result:
    """Run an hpctrain command as another user, with limited memory and time."""
    limited = [sys.executable, "-c", LIMITED, *as_somebody(), *HPCTRAIN, *map(str, words)]
    quiet = {"HOME": "/nonexistent", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    return run_in_group(limited, environment({**quiet, **(env or {})}), None, timeout)


MOST_MEMORY = 3 << 30
LIMITED = (
    "import os, resource, sys\n"
    f"resource.setrlimit(resource.RLIMIT_AS, ({MOST_MEMORY}, {MOST_MEMORY}))\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)
assert resource.RLIMIT_AS  # without it, the limit above would not exist


def sound_run(folder: Path) -> Path:
    """Fill a folder like that of a completed run, and return it."""
    for name in ("logs", "ranks", "monitor", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "run.yaml").write_text("name: wave\ntask: 'x.py:task'\n")
    verdict = {"action": "done", "exit_code": 0, "reason": "done after step 20", "fix": ""}
    entry = {"attempt": 1, "started": 100.0, "ended": 160.0, "ranks": 2, "verdict": verdict}
    (folder / "run.json").write_text(json.dumps({"id": "a" * 32, "fence": 1, "attempts": [entry]}))
    started = {"ranks": 2, "hosts": ["n1"], "framework": "torch", "reducer": "mpi", "versions": {}}
    trained = {"loss": 0.5, "lr": 1.0, "samples_per_s": 9.0, "seconds": {"forward": 1.0}, "steps": 10}
    write_events(
        folder,
        event("run_started", 0, **started),
        event("train", 10, **trained),
        event("train", 20, **trained),
        event("run_finished", 20, reason="completed", steps=20, seconds=60.0),
    )
    return folder


def event(name: str, step: Any, **fields: Any) -> dict[str, Any]:
    """An event of the first attempt, as JSON."""
    return {"time": 100.0 + (step if isinstance(step, int) else 0), "event": name, "step": step, "attempt": 1, **fields}


def write_events(folder: Path, *events: Mapping[str, Any]) -> None:
    """Append events to a run folder's log."""
    with open(folder / "events.jsonl", "a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in events))

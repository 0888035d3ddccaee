"""Start real `hpctrain` commands from a test, and read what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hpctrain.run_dir import RunDir
from tests.support.mpi import Result, rank_environment, run_in_group

TASK = Path(__file__).parents[1] / "dist" / "programs" / "launch_task.py"
HPCTRAIN = [sys.executable, "-m", "hpctrain"]


def write_run(folder: Path, mode: str = "", train: Mapping[str, Any] | None = None, **sections: Any) -> Path:
    """A run file for the misbehaving task of programs/launch_task.py, with its run folder at <folder>/run."""
    task_args = {"mode": mode, **sections.pop("task_args", {})}
    run = {
        "name": "test",
        "task": f"{TASK}:task",
        "task_args": task_args,
        "run_dir": str(folder / "run"),
        "train": {"steps": 12, "global_batch": 4, **(train or {})},
        "reduce": {"kind": "mpi"},
        "monitor": {"enabled": False},
        **sections,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(run))  # JSON is YAML
    return path


def hpctrain(*words: object, env: Mapping[str, str] | None = None, timeout: float = 90) -> Result:
    """Runs one command to its end."""
    return run_in_group([*HPCTRAIN, *map(str, words)], rank_environment(env), None, timeout)


@contextmanager
def started(*words: object, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command under way; whatever is left of it at the end is killed."""
    child = subprocess.Popen(
        [*HPCTRAIN, *map(str, words)],
        env=rank_environment(env),
        text=True,
        errors="replace",
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a test run in the background ignores interrupts, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        yield child
    finally:
        for process in processes_of(child.pid):
            process.kill()
        child.kill()
        child.communicate()


def processes_of(pid: int) -> list[psutil.Process]:
    """The descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Polls until a condition gives something true, and returns that."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(0.02)
    return found


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Events of one name of the run in <folder>/run."""
    return [event for event in RunDir(folder / "run").read_events() if event["event"] == name]


def reaches_step(folder: Path, step: int) -> Callable[[], bool]:
    """A condition: the run has reported a step."""
    return lambda: any(event["step"] >= step for event in events(folder, "train"))


def words(folder: Path, attempt: int = 1) -> dict[str, Any]:
    """Merged last words of an attempt."""
    return RunDir(folder / "run").read_words(attempt)


def endings(folder: Path, attempt: int = 1) -> list[str]:
    """How each rank ended."""
    return [word["ending"] for word in words(folder, attempt)["ranks"]]


def leftovers(folder: Path) -> list[str]:
    """Command lines of processes that still work on a run folder."""
    needle = str(folder)
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        environment = process.info["environ"] or {}
        alive = process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        if alive and (needle in line or environment.get("HPCTRAIN_RUN_DIR", "").startswith(needle)):
            found.append(f"{process.pid} {line}")
    return found

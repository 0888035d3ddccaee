"""Run ``hpctrain`` from a test as a user does, and read what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import read as read_words
from hpctrain.run.run_view import RunView
from tests.support.mpi import LAUNCH_S, PATIENCE_S, Result, rank_environment, run_in_group
from tests.support.warm_ranks import STAND_IN, variables

ONE_ATTEMPT = {"max_failures": 0}
"""A ``launch`` section without restarts."""
PROJECT = Path(__file__).parents[2]
HPCTRAIN = [sys.executable, "-m", "hpctrain"]
MISBEHAVING = PROJECT / "tests" / "dist" / "programs" / "launch_task.py"


def hpctrain(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = LAUNCH_S,
    code: int | None = 0,
    warm: str = "",
) -> Result:
    """Run a command to completion; fail the test unless it exits with ``code`` (None: any).

    With ``warm``, "torch" or "tensorflow", ranks are forked from a process that has imported that framework.
    """
    command = [*HPCTRAIN, *map(str, words)]
    result = run_in_group(command, environment(_ready(warm) | dict(env or {})), cwd, timeout)
    if code is not None:
        assert result.returncode == code, f"exit {result.returncode}: {' '.join(command)}\n{result.output}"
    return result


@contextmanager
def started(
    *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, warm: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """A running command; whatever remains of it at the end is killed. ``warm`` as in ``hpctrain``."""
    child = subprocess.Popen(
        [*HPCTRAIN, *map(str, words)],
        env=environment(_ready(warm) | dict(env or {})),
        cwd=cwd,
        text=True,
        errors="replace",
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        for process in processes_of(child.pid):
            process.kill()
        child.kill()
        child.communicate()


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a user who has set nothing, not even OMP_NUM_THREADS, which the launcher sets."""
    made = rank_environment({"PYTHONPATH": str(PROJECT), **(extra or {})})
    del made["OMP_NUM_THREADS"]
    return made


def _ready(warm: str) -> dict[str, str]:
    return variables(warm, rank_environment({"PYTHONPATH": str(PROJECT)})) if warm else {}


def write_run(folder: Path, **keys: Any) -> Path:
    """Write a run file to a folder, and return its path."""
    path = folder / "run.yaml"
    path.write_text(json.dumps({"name": "run", **keys}))  # JSON is YAML
    return path


def misbehaving_run(folder: Path, mode: str = "", train: Mapping[str, Any] | None = None, **sections: Any) -> Path:
    """Write a run file for the task of programs/launch_task.py, with the run folder <folder>/run."""
    return write_run(
        folder,
        task=f"{MISBEHAVING}:task",
        task_args={"mode": mode, **sections.pop("task_args", {})},
        run_dir=str(folder / "run"),
        train={"steps": 12, "global_batch": 4, **(train or {})},
        **{"reduce": {"kind": "mpi"}, "monitor": {"enabled": False}, "launch": ONE_ATTEMPT, **sections},
    )


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """Events with this name in a run folder."""
    return [event.to_json() for event in RunView(run).events() if event.name == name]


def refused(result: Result, code: int, *parts: str) -> None:
    """Check for one message with these parts, no traceback, and this exit code."""
    assert result.returncode == code, result.output
    for part in parts:
        assert part in result.stderr, result.output
    assert result.stderr.count("hpctrain: ") == 1, result.stderr
    assert result.stderr.count("  fix: ") == 1, result.stderr
    assert "Traceback" not in result.output


def assert_explained(run: Path, cause: str, *parts: str) -> None:
    """Check that ``hpctrain explain`` names the cause, these parts of it, and advice."""
    answer = json.loads(hpctrain("explain", run, "--json").stdout)
    said = " ".join([answer["title"], *answer["evidence"], answer["advice"]])
    assert answer["cause"] == cause and bool(answer["advice"]) == (cause != "completed"), answer
    assert [part for part in parts if part not in said] == []


def reaches_step(run: Path, step: int) -> Callable[[], bool]:
    """A condition for ``wait_for``: the run has reported this step or a later one."""
    return lambda: any(event["step"] >= step for event in events(run, "train"))


def last_words(run: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """Last words of all ranks of an attempt, in rank order."""
    words = read_words(RunDir(run), attempt)
    assert words is not None
    return [word.to_json() for word in words.ranks]


def endings(run: Path, attempt: int = 1) -> list[str]:
    """How each rank ended."""
    return [word["ending"] for word in last_words(run, attempt)]


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Poll until a condition returns something true, and return that. Pauses grow: conditions read events and /proc."""
    begin = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - begin
        assert waited < timeout_s, f"no {what} within {timeout_s:g} s"
        time.sleep(min(0.02 + waited / 20, 0.2))
    return found


def gone(pid: int) -> bool:
    """Whether a process no longer runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def processes_of(pid: int) -> list[psutil.Process]:
    """The descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_of(pid: int) -> list[psutil.Process]:
    """Ranks below a supervisor, sorted by pid."""
    found = []
    for each in processes_of(pid):
        with suppress(psutil.NoSuchProcess):  # a helper of the supervisor that has already ended
            found += [each] if "train" in (words := each.cmdline()) and str(STAND_IN) not in words else []
    return sorted(found, key=lambda each: each.pid)


def is_parent(process: psutil.Process) -> bool:
    """Whether a process is the one that forks a run's ranks."""
    return "hpctrain.launch.forks.parent" in process.cmdline()


def leftovers(folder: Path) -> list[str]:
    """Pids and command lines of processes that still work on a run folder."""
    needle = str(folder)
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        environ = process.info["environ"] or {}
        alive = process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        if alive and (needle in line or environ.get("HPCTRAIN_RUN_DIR", "").startswith(needle)):
            found.append(f"{process.pid} {line}")
    return found

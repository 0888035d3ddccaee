"""Run a Python program on real MPI ranks of this machine, from a test."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.comm.launched import QUICK_START
from hpctrain.system.processes import own_session
from tests.support import warm_ranks

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "dist" / "programs"
PATIENCE_S = 120.0
"""Timeout for anything that takes seconds on an idle machine."""
LAUNCH_S = 240.0
"""Timeout for a whole launch."""
_AS_ROOT = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("PRTE", "OMPI") for suffix in ("", "_CONFIRM")}
GIVES_WAY = {"OMPI_MCA_mpi_yield_when_idle": "1"}
"""Makes waiting ranks yield the core instead of spinning, because two tests share the cores."""
_FRESH = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "HOROVOD_", "HPCTRAIN_")


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command, such as one that runs all ranks."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Standard output, then standard error."""
        return self.stdout + self.stderr


def find_mpirun() -> str | None:
    """The mpirun of this environment, else the first one on PATH."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


@functools.cache
def is_open_mpi(mpirun: str) -> bool:
    """Whether this mpirun is Open MPI's, whose options differ from MPICH's."""
    return (
        "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    )


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment for ranks: one thread each, quiet, nothing inherited from a launcher around the tests.

    PYTHONPATH includes that of the tests: ``make torture`` has packages there that the environment lacks.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FRESH)}
    env |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"} | _AS_ROOT
    env |= QUICK_START | GIVES_WAY
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    added = dict(extra or {})
    if "PYTHONPATH" in added:
        added["PYTHONPATH"] = python_path(added["PYTHONPATH"])
    return env | added


def python_path(*folders: Path | str) -> str:
    """A PYTHONPATH of these folders, followed by that of the tests."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_in_group(command: list[str], env: Mapping[str, str], cwd: Path | None, timeout: float) -> Result:
    """Run a command in its own session; on timeout, end all of it and raise AssertionError with its output."""
    with own_session(env) as session:
        child = subprocess.Popen(
            command, env=session, cwd=cwd, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            stdout, stderr = child.communicate(timeout=timeout)
        except BaseException as error:
            stdout, stderr = _end(child)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AssertionError(f"no end after {timeout:g} s: {' '.join(command)}\n{stdout}{stderr}") from None
    return Result(child.returncode, stdout, stderr)


def mpirun(
    ranks: int,
    program: Path | str,
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = LAUNCH_S,
    check: bool = True,
    warm: str = "",
) -> Result:
    """Run a Python file (Path) or module (str) on `ranks` ranks; with check, fail the test unless all exit with 0.

    They find the package `tests`. With `warm`, "torch" or "tensorflow", a file's ranks are forked from a process that
    has imported that framework.
    """
    command = rank_command(ranks, program, *args, warm=warm)
    result = run_in_group(command, rank_environment({"PYTHONPATH": str(ROOT), **(env or {})}), cwd, timeout)
    assert not check or result.returncode == 0, f"exit {result.returncode}: {' '.join(command)}\n{result.output}"
    return result


def printed(ranks: int, program: str, *args: object, **options: Any) -> Any:
    """JSON in the last line that a program of tests/dist/programs prints; options as of `mpirun`."""
    result = mpirun(ranks, PROGRAMS / program, *args, **options)
    return json.loads(result.stdout.strip().splitlines()[-1])


def rank_command(ranks: int, program: Path | str, *args: object, warm: str = "") -> list[str]:
    """The command line of `mpirun`."""
    launcher = find_mpirun()
    assert launcher, "no mpirun beside this Python or on PATH"
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if is_open_mpi(launcher) else ["-bind-to", "none"]
    target = [str(program)] if isinstance(program, Path) else ["-m", program]
    return [launcher, *options, "-n", str(ranks), *python(warm), *target, *map(str, args)]


def python(warm: str) -> list[str]:
    """Command prefix that runs a program: Python, or a stand-in for a fork of a process with a framework imported."""
    return warm_ranks.command(warm, rank_environment({"PYTHONPATH": str(ROOT)})) if warm else [sys.executable]


def _end(child: subprocess.Popen[str]) -> tuple[str, str]:
    for number in (signal.SIGTERM, signal.SIGKILL):  # on TERM, mpirun ends its ranks
        try:
            os.killpg(child.pid, number)
            return child.communicate(timeout=30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    return child.communicate()

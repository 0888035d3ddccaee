"""Starts the processes of a row and returns its result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.rows import PACKAGE, Figures, Row
from hpctrain.errors import HpctrainError
from hpctrain.launch.mpi_library import MpiRun, find_mpirun, launcher_environment, probe
from hpctrain.system import python
from hpctrain.system.cgroups import thread_environment, threads_per_rank, usable_cores
from hpctrain.system.processes import own_session

ROOT = Path(__file__).parents[2]
ENDING_S = 10.0


@dataclass(frozen=True)
class Found:
    """Result of a row."""

    name: str
    what: str
    status: str
    """passed, failed or skipped."""
    seconds: float = 0.0
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    traceback: str = ""


def run_row(row: Row, folder: Path, timeout_s: float) -> Found:
    """Runs a row in separate processes, which are ended with it."""
    folder.mkdir(parents=True)
    cores = usable_cores()
    environment = {**os.environ, **thread_environment(threads_per_rank(cores, row.ranks), os.environ)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    prefix: list[str] = []
    if row.ranks > 1:
        try:
            library = probe()
            mpirun = MpiRun(find_mpirun(library), library.flavour)
        except HpctrainError as error:
            return Found(row.name, row.what, "skipped", reason=str(error))
        environment |= launcher_environment(mpirun.flavour, os.environ)
        prefix = mpirun.argv(row.ranks, {}, cores)
    command = [*prefix, *python.module(f"{PACKAGE}.one_row", row.name, str(folder))]
    began, log = time.monotonic(), folder / "output.txt"
    with log.open("w") as output, own_session(environment) as session:
        child = subprocess.Popen(
            command, env=session, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(child)
    seconds = round(time.monotonic() - began, 1)
    if code is None:
        return Found(row.name, row.what, "failed", seconds, f"no end within {timeout_s:.0f} s")
    if problem := first_problem(folder):
        return Found(row.name, row.what, seconds=seconds, **problem)
    if code or not (folder / "figures.json").exists():
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        return Found(row.name, row.what, "failed", seconds, f"exit code {code}: {said[-1]}")
    return Found(row.name, row.what, "passed", seconds, figures=json.loads((folder / "figures.json").read_text()))


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a row; mpirun ends its ranks on SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDING_S)
            return


def first_problem(folder: Path) -> dict[str, Any] | None:
    """Report of the rank that failed first; ranks that only waited for it fail later."""
    told = sorted(folder.glob("problem-*.json"), key=lambda path: path.stat().st_mtime_ns)
    said = [json.loads(path.read_text()) for path in told]
    return next((one for one in said if one["status"] == "failed"), said[0] if said else None)

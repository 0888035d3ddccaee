"""Runs a benchmark's program on ranks of this machine and reads the rows that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import RunFailed
from hpctrain.system import python

TIMEOUT_S = 1800
ENDING_S = 10


def on_ranks(module: str, options: Mapping[str, str], ranks: int) -> list[dict[str, Any]]:
    """The rows that rank 0 of ``python -m module`` writes to the file that it is given as ``--out``. One thread a rank.

    Raises:
        RunFailed: the program failed; its last lines are in the message.
    """
    from hpctrain.launch.mpi_library import MpiRun, find_mpirun, launcher_environment, probe
    from hpctrain.system.cores import thread_environment, usable_cores
    from hpctrain.system.processes import own_session

    environment = {**os.environ, **thread_environment(1, os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    prefix: list[str] = []
    if ranks > 1:
        library = probe()
        mpirun = MpiRun(find_mpirun(library), library.flavour)
        environment |= launcher_environment(mpirun.flavour, ranks > usable_cores(), os.environ)
        prefix = mpirun.argv(ranks, {}, usable_cores())
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        out = Path(folder, "rows.json")
        words = [word for pair in options.items() for word in pair]
        command = [*prefix, *python.module(module, *words, "--out", str(out))]
        with (
            own_session(environment) as session,
            subprocess.Popen(
                command, env=session, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as child,
        ):
            try:
                said, _ = child.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                child.terminate()  # mpirun ends its ranks when it is asked to, not when it is killed
                try:
                    child.wait(ENDING_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                fix = "measure less: fewer --rounds, --steps or contenders; hpctrain doctor checks that ranks can talk"
                raise RunFailed(f"{module} did not end within {TIMEOUT_S} s", fix) from error
        if child.returncode or not out.exists():
            raise RunFailed(
                f"{module} ended with code {child.returncode}:\n{said[-4000:]}",
                "read the lines above; hpctrain doctor checks the installation",
            )
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
        return rows


def write_rows(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """What such a program hands back."""
    Path(path).write_text(json.dumps({"rows": list(rows)}))

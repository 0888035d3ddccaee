"""The preflight's program, run on every rank: ``python -m hpctrain.launch.engines.slurm.probe``.

Prints one JSON line before MPI starts, so that a host on which MPI hangs is known, and one after a small allreduce.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpctrain.errors import code_of
from hpctrain.system.gpus import usable_gpus

MARK = "hpctrain-probe "


def main() -> int:
    """Reports on this rank's host, then on MPI."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--scratch", default="")
    parser.add_argument("--mpi", action="store_true")
    args = parser.parse_args()
    host = {
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME"),
        "task": os.environ.get("SLURM_PROCID"),
        "cpus": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
        "devices": devices(),
        **write_problem("run_dir", args.run_dir),
        **write_problem("scratch", scratch_dir(args.scratch)),
    }
    say({"stage": "host", **host})
    if args.mpi:
        say({"stage": "mpi", "host": host["host"], **join()})
    return 0


def say(report: dict[str, Any]) -> None:
    """Prints a report as one line in one write, so that ranks' lines do not mix; srun keeps 1024 bytes together."""
    os.write(sys.stdout.fileno(), (MARK + json.dumps(report) + "\n").encode())


def scratch_dir(named: str) -> Path:
    """Returns the node-local folder. A leading $NAME is expanded here, on the node; default: the temporary folder."""
    if named.startswith("$"):
        variable, _, rest = named[1:].partition("/")
        base = os.environ.get(variable.strip("{}"))
        return Path(base, rest) if base else Path(tempfile.gettempdir())
    return Path(named) if named else Path(tempfile.gettempdir())


def write_problem(name: str, folder: Path) -> dict[str, str | None]:
    """Tries to write a file in a folder; returns NAME_error, the reason or None, and NAME_code if it failed."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hpctrain-probe-") as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return {f"{name}_error": f"{folder}: {error.strerror}", f"{name}_code": code_of(error)}
    return {f"{name}_error": None}


def devices() -> list[str]:
    """Returns the GPUs that this process can use: UUIDs if nvidia-smi lists them, else names of launcher or kernel."""
    given = (os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"))
    named = next((names for names in given if names is not None), None)
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        if named is None:
            return [str(gpu.path) for gpu in usable_gpus()]
        return [word for word in named.split(",") if word]
    every = [
        line.split("UUID: ")[1].rstrip(")")
        for line in listed.splitlines()
        if line.startswith("GPU ") and "UUID" in line
    ]
    if named is None:
        return every
    by_index = {str(index): name for index, name in enumerate(every)}
    return [by_index.get(word, word) for word in named.split(",") if word]


def join() -> dict[str, Any]:
    """Runs an allreduce over all ranks; returns its sum, and the rank's place as MPI sees it."""
    import numpy as np

    try:
        from mpi4py import MPI
    except ImportError as error:
        return {"mpi_error": f"mpi4py cannot be imported: {error}"}
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    total = np.array([world.rank], dtype=np.int64)
    world.Allreduce(MPI.IN_PLACE, total)
    world.Barrier()
    return {
        "rank": world.rank,
        "size": world.size,
        "local_rank": local.rank,
        "sum": int(total[0]),
        "after": time.time(),
        "library": MPI.Get_library_version().split("\n")[0].split(",")[0].rstrip("\0 "),
    }


if __name__ == "__main__":
    sys.exit(main())

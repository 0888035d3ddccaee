"""One rank of one row: ``python -m benchmarks.gpu_proof.one_row NAME FOLDER``.

Rank 0 writes ``figures.json`` to the folder; a rank that fails writes ``problem-<rank>.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_proof.rows import PACKAGE, ROWS, Setting, Skipped, Wrong
from hpctrain.system import python

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SEVERAL_ON_ONE_GPU = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Makes cuBLAS deterministic."""


def rank_of_environment() -> int:
    """This process's rank according to its launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def main(name: str, folder: Path) -> int:
    """Runs the row; returns an exit code: 0 passed, 3 skipped, 1 failed."""
    row, rank = ROWS[name], rank_of_environment()
    if row.ranks > 1:  # make NCCL treat ranks as on different hosts, so that they can share a GPU
        os.environ.update({"NCCL_HOSTID": f"rank-{rank}", **SEVERAL_ON_ONE_GPU})
    os.environ.update(REPEATABLE)
    import torch

    file, _, function = row.function.partition(":")
    problem = {}
    try:
        on_gpu = torch.cuda.is_available()
        figures = getattr(importlib.import_module(f"{PACKAGE}.{file}"), function)(Setting(row, folder, rank, on_gpu))
        if rank == 0:
            (folder / "figures.json").write_text(json.dumps(figures))
        return 0
    except Skipped as error:
        problem = {"status": "skipped", "reason": str(error)}
    except Wrong as error:
        problem = {"status": "failed", "reason": str(error)}
    except BaseException as error:
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        problem = {"status": "failed", "reason": reason, "traceback": traceback.format_exc()}
    (folder / f"problem-{rank}.json").write_text(json.dumps(problem))
    return 3 if problem["status"] == "skipped" else 1


if __name__ == "__main__":
    python.leave(main(sys.argv[1], Path(sys.argv[2])))

"""Sums by Horovod: built with NCCL where possible, otherwise as installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof import tasks
from benchmarks.gpu_proof.machine import device_of
from benchmarks.gpu_proof.plans import BATCH, CLOSE, IN_FLOAT64, STEPS
from benchmarks.gpu_proof.rows import HOROVOD, WHEELS, Figures, Setting, Skipped, require
from benchmarks.gpu_proof.runs import furthest, run_file, trained
from hpctrain.system import python

SEEN = """
import json, torch, horovod.torch as hvd
print(json.dumps({"NCCL": int(hvd.nccl_built()), "MPI": bool(hvd.mpi_built())}))
"""


def build(setting: Setting) -> Figures:
    """Builds Horovod on a GPU with a compiler and the sources; otherwise the installed one must load."""
    sdist = Path(os.environ.get(WHEELS, "."), HOROVOD)
    if setting.on_gpu and sdist.exists():
        lacks = [name for name in ("nvcc", "g++", "mpicc") if shutil.which(name) is None]
        if lacks:
            raise Skipped(f"{' and '.join(lacks)} is not on PATH")
        words = ["install-horovod", "--gpu", "--force", "--sdist", str(sdist), "--wheel-dir", str(setting.folder)]
        done = subprocess.run(python.module("hpctrain", *words), capture_output=True, text=True, check=False)
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        require(done.returncode == 0, f"install-horovod: {said[-1]}")
    seen = loaded()
    if setting.on_gpu:
        require(seen["NCCL"] > 0, "this Horovod is built without NCCL")
    return seen


def loaded() -> dict[str, Any]:
    """Features of the installed Horovod. Raises Skipped if there is none."""
    done = subprocess.run(python.code(SEEN), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise Skipped(f"no Horovod is installed, and there are no sources and no GPU to build it for ({last})")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def train(setting: Setting) -> Figures:
    """Checks that the losses are those of one process."""
    loaded()
    reduce = {"kind": "horovod", "verify_every_steps": 1}
    losses = trained(run_file(setting.folder / "run", "gpt", IN_FLOAT64, STEPS, BATCH, reduce=reduce)).of_step
    if setting.rank:
        return {}
    task, device = tasks.gpt(**IN_FLOAT64), device_of(setting.on_gpu)
    task.model.to(device)
    wanted = tasks.bare_loop(task, tasks.batches(task, BATCH, STEPS, device))
    require(len(losses) == STEPS, f"losses of steps {sorted(losses)} were reported")
    difference = furthest(list(losses.values()), wanted)
    require(difference <= CLOSE, f"losses differ by {difference:.2g} from those of one process")
    return {"difference_of_losses": difference}

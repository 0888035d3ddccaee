"""Each plan on several ranks: equal to one process up to rounding, and bitwise identical after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_proof import tasks
from benchmarks.gpu_proof.machine import device_of
from benchmarks.gpu_proof.rows import Figures, Setting, Skipped, require
from benchmarks.gpu_proof.runs import OF_WEIGHTS, StopAfter, different, furthest, run_file, saved, trained
from hpctrain import Config
from hpctrain.backends.torch.strategies.fsdp.fsdp_strategy import OLDEST, is_too_old

STEPS, BATCH, STOP_AT = 6, 8, 3
IN_FLOAT64: dict[str, Any] = {"dtype": "float64"}
CLOSE = 1e-9
"""Tolerance in float64 for sums in a different order."""


def parallel(word: str, ranks: int) -> dict[str, Any]:
    """Section ``parallel`` of the run file."""
    if word in ("tensor", "pipeline"):
        return {word: ranks}
    if word == "grid":
        return {"tensor": 2, "pipeline": ranks // 2}
    return {} if word == "replicated" else {"shard": word}


def row(setting: Setting) -> Figures:
    """Checks one plan; see the module."""
    if setting.word in ("gradients", "parameters") and is_too_old():
        raise Skipped(f"parallel.shard: {setting.word} needs PyTorch {OLDEST}, and this is {torch.__version__}")
    torch.use_deterministic_algorithms(True, warn_only=True)

    def config(name: str) -> Config:
        plan = parallel(setting.word, setting.row.ranks)
        folder = setting.folder / name
        return run_file(folder, "gpt", IN_FLOAT64, STEPS, BATCH, train={"accumulate": 2}, parallel=plan)

    losses = trained(config("whole")).of_step
    trained(config("parts"), [StopAfter(STOP_AT)])
    later = trained(config("parts")).of_step
    return compared(setting.folder, losses, later, setting.on_gpu) if setting.rank == 0 else {}


def compared(folder: Path, losses: dict[int, float], later: dict[int, float], on_gpu: bool) -> Figures:
    """Compares with the same training in one process, by a bare loop on rank 0's device."""
    task, device = tasks.gpt(**IN_FLOAT64), device_of(on_gpu)
    task.model.to(device)
    wanted = tasks.bare_loop(task, tasks.batches(task, BATCH, STEPS, device))
    weights = {OF_WEIGHTS + name: value.detach().cpu().numpy() for name, value in task.model.named_parameters()}
    found = saved(folder / "whole")
    require(weights.keys() <= found.keys(), f"the checkpoint lacks {sorted(weights.keys() - found.keys())[:3]}")
    require(len(losses) == STEPS, f"losses of steps {sorted(losses)} were reported")
    of_losses = furthest(list(losses.values()), wanted)
    of_weights = furthest([found[name] for name in weights], list(weights.values()))
    require(of_losses <= CLOSE, f"losses differ by {of_losses:.2g} from those of one process")
    require(of_weights <= CLOSE, f"weights differ by {of_weights:.2g} from those of one process")
    require(sorted(later) == list(range(STOP_AT + 1, STEPS + 1)), f"the resumed run reports steps {sorted(later)}")
    unequal = [name for name in different(found, saved(folder / "parts")) if not is_time(name)]
    require(not unequal, f"after a resume {len(unequal)} arrays have other bits: {', '.join(unequal[:3])}")
    return {"difference_of_losses": of_losses, "difference_of_weights": of_weights, "arrays_equal": len(found)}


def is_time(name: str) -> bool:
    """Whether an array of a checkpoint holds times, which differ between runs."""
    return name.startswith("hook/")

"""Speeds of models for which others have published one, on the same input from a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_proof import tasks
from benchmarks.gpu_proof.machine import peak_per_s
from benchmarks.gpu_proof.rows import Figures, Setting, require
from benchmarks.gpu_proof.runs import run_file, trained
from benchmarks.gpu_proof.speed import WARM, Clocked, can_compile, operations_of

RECIPE = Path(__file__).parents[2] / "examples/recipes/weather"


def vit(setting: Setting) -> Figures:
    """Trains NERSC's ViT for weather (tutorial at SC25; 64 samples/s on one A100) on fields in an HDF5 file."""
    shape = (20, 360, 720) if setting.on_gpu else (2, 16, 32)
    batch, times = (16, 49) if setting.on_gpu else (2, 5)
    program = [sys.executable, str(RECIPE / "make_states.py"), *map(str, (times, *shape))]
    setting.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(program, cwd=setting.folder, check=True, timeout=120)
    files = {name: str(setting.folder / f"{name}.h5") for name in ("train", "validation")}
    sizes = {} if setting.on_gpu else {"width": 32, "blocks": 2, "heads": 4}
    return figures(setting, f"{RECIPE / 'weather.py'}:task", {**files, **sizes}, batch, {})


def llama(setting: Setting) -> Figures:
    """Trains a model of Llama 3's shape, 8 B parameters and 4,096 tokens (published on one H200: 10,471 tokens/s).

    All of it, with AdamW, in bf16: with weights and averages in fp32 it would not fit. Layers are computed again in
    backward.
    """
    sizes: dict[str, Any] = {"length": 4096} if setting.on_gpu else tasks.SMALL_LLAMA
    batch = 2
    found = figures(setting, "llama", sizes, batch, {"recompute": ["blocks.*"]})
    per_step = operations_of(tasks.llama(**sizes), batch, setting.on_gpu)
    found["mfu"] = per_step * found["samples_per_s"] / batch / peak_per_s(setting.on_gpu)[0]
    return {**found, "tokens_per_s": found["samples_per_s"] * sizes["length"]}


def figures(setting: Setting, task: str, task_args: dict[str, Any], batch: int, train: dict[str, Any]) -> Figures:
    """Samples per second in bf16 after the warm-up, and peak memory."""
    steps = WARM + (20 if setting.on_gpu else 4)
    compiles = can_compile(setting.on_gpu)
    clocked = Clocked(WARM, steps, setting.on_gpu)
    sections: dict[str, Any] = {
        "train": {"precision": "bf16", "compile": compiles, **train},
        "track": {"every_steps": WARM},
        "checkpoint": {"enabled": False},
    }
    losses = trained(run_file(setting.folder / "run", task, task_args, steps, batch, **sections), [clocked]).of_step
    first, *_, last = losses.values()
    require(last < first, f"the loss does not fall: {first:.4g}, then {last:.4g}")
    peak = torch.cuda.max_memory_allocated() / 1e9 if setting.on_gpu else 0.0
    return {"compiled": compiles, "samples_per_s": batch / clocked.step_s, "peak_GB": peak, "last_loss": last}

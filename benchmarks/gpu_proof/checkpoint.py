"""Checkpoints of a model in device memory."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu_proof.machine import device_of, finish
from benchmarks.gpu_proof.rows import Figures, Setting, require
from benchmarks.gpu_proof.runs import OF_WEIGHTS, StopAfter, different, run_file, saved, trained
from hpctrain import BaseHook, RunView
from hpctrain.run.events import CheckpointSaved

STEPS = 6
SMALL = {"width": 128, "blocks": 4, "heads": 4}
LARGE = {"width": 768, "blocks": 6, "heads": 12, "length": 128}
STEP_S = 0.2
"""Minimum seconds of a step, so that a save is over before the next one begins."""


class Weights(BaseHook):
    """Keeps the weights in device memory after the last step."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def after_step(self, training: Any, result: Any) -> None:
        """Lengthens the step."""
        time.sleep(STEP_S)

    def after_fit(self, training: Any, reason: Any) -> None:
        """Copies the weights."""
        model = training.framework.model
        self.found = {OF_WEIGHTS + name: value.detach().cpu().numpy() for name, value in model.named_parameters()}


def stall(setting: Setting) -> Figures:
    """Compares the stall of a save with a bare copy to the host and torch.save of the same bytes."""
    sizes = LARGE if setting.on_gpu else SMALL
    weights = Weights()
    config = run_file(setting.folder / "run", "gpt", sizes, 3 * STEPS, 8, checkpoint={"every_steps": STEPS})
    trained(config, [weights])
    saves = [event for event in RunView(setting.folder / "run").events() if isinstance(event, CheckpointSaved)]
    found = saved(setting.folder / "run")
    unequal = [name for name, value in weights.found.items() if found[name].tobytes() != value.tobytes()]
    require(bool(weights.found) and not unequal, f"the checkpoint has other bits than the device: {unequal[:3]}")
    require(len(saves) == 3, f"{len(saves)} checkpoints were announced, not 3")
    last = saves[1]  # the first one allocates, and the third is at the end of training
    assert last.bytes and last.stall_s is not None and last.write_s is not None, "each says it"
    tensor = torch.ones(last.bytes, dtype=torch.uint8, device=device_of(setting.on_gpu))
    host = torch.empty(last.bytes, dtype=torch.uint8, pin_memory=setting.on_gpu)
    copy_s = timed(lambda: host.copy_(tensor), setting.on_gpu)
    save_s = timed(lambda: torch.save(tensor, setting.folder / "plain.pt"), setting.on_gpu)
    return {
        "MB": last.bytes / 1e6,
        "stall_ms": 1000 * last.stall_s,
        "bare_copy_ms": 1000 * copy_s,
        "torch_save_ms": 1000 * save_s,
        "write_ms": 1000 * last.write_s,
    }


def timed(work: Any, on_gpu: bool) -> float:
    """Seconds of the fastest of three calls."""
    seconds = []
    for _ in range(3):
        finish(on_gpu)
        began = time.perf_counter()
        work()
        finish(on_gpu)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def resume(setting: Setting) -> Figures:
    """Checks that a resume is bitwise identical, with autocast to bf16 and random numbers of the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    made = {
        name: run_file(setting.folder / name, "gpt", {"dropout": True}, STEPS, 8, train={"precision": "bf16"})
        for name in ("whole", "parts")
    }
    losses = trained(made["whole"]).of_step
    before = trained(made["parts"], [StopAfter(STEPS // 2)]).of_step
    after = trained(made["parts"]).of_step
    require({**before, **after} == losses, f"losses {losses} became {before} and {after}")
    require(not before.keys() & after.keys(), "a step was trained twice")
    whole, parts = saved(setting.folder / "whole"), saved(setting.folder / "parts")
    unequal = different(whole, parts)
    require(not unequal, f"{len(unequal)} arrays have other bits: {', '.join(unequal[:3])}")
    return {"arrays_equal": len(whole), "last_loss": losses[STEPS]}

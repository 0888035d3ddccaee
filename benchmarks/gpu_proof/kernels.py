"""Step times of one model under different settings of kernels, whose losses must agree."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_proof import tasks
from benchmarks.gpu_proof.machine import device_of, finish
from benchmarks.gpu_proof.rows import Figures, Setting, require
from benchmarks.gpu_proof.runs import furthest, run_file, trained
from benchmarks.gpu_proof.speed import WARM, Clocked, can_compile
from hpctrain.backends.torch.steps.updates import OptimizerStep
from hpctrain.backends.torch.task.by_name import make_optimizer

LARGEST = {"tf32": 2e-2, "benchmark": 2e-2, "compiled": 1e-3, "graphs": 1e-3}
"""Largest relative difference of mean losses from those of the first setting: factors of 10 bits, other kernels."""


def matmul(setting: Setting) -> Figures:
    """Trains a GPT in fp32, exactly and by TF32."""
    sizes = {"width": 1024, "blocks": 12, "heads": 16, "length": 1024} if setting.on_gpu else {"length": 32}
    settings = {"exact": {"matmul": "exact"}, "tf32": {"matmul": "tf32"}}
    return compared(setting, "gpt", sizes, 8, settings)


def convolutions(setting: Setting) -> Figures:
    """Trains a ResNet in bf16, with cuDNN's choice of kernels and the fastest ones."""
    sizes = {} if setting.on_gpu else {"blocks": "1,1", "width": 8, "size": 32, "samples": 64}
    common = {"precision": "bf16", "channels_last": True}
    settings = {"chosen": common, "benchmark": {**common, "cudnn_benchmark": True}}
    return compared(setting, "resnet", sizes, 128 if setting.on_gpu else 8, settings)


def graphs(setting: Setting) -> Figures:
    """Trains a GPT so small that launching its kernels takes longer than computing: as written, compiled, and recorded
    as CUDA graphs; with accumulation, for which gradients must not stay in the graphs' memory."""
    compiles = can_compile(setting.on_gpu)
    settings: dict[str, dict[str, Any]] = {
        "eager": {},
        "compiled": {"compile": compiles},
        "graphs": {"compile": compiles, "compile_mode": "reduce-overhead" if compiles else "default"},
    }
    common = {"accumulate": 2}
    every = {name: {**common, **keys} for name, keys in settings.items()}
    return {"compiled": compiles, **compared(setting, "gpt", {"width": 64, "blocks": 8}, 8, every)}


def compared(setting: Setting, task: str, sizes: Any, batch: int, settings: Mapping[str, Mapping[str, Any]]) -> Figures:
    """Runs one task under each setting of ``train``, alternately; returns milliseconds of a step.

    The losses whose differences it requires and returns are means of the warm-up: later ones diverge by rounding.
    """
    steps = WARM + (20 if setting.on_gpu else 4)
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    losses: dict[str, list[float]] = {}
    for turn in range(2):
        for name, train in settings.items():
            clocked = Clocked(WARM, steps, setting.on_gpu)
            sections: dict[str, Any] = {"train": dict(train), "track": {"every_steps": WARM}}
            folder = setting.folder / f"{name}-{turn}"
            config = run_file(folder, task, sizes, steps, batch, checkpoint={"enabled": False}, **sections)
            losses[name] = list(trained(config, [clocked]).of_step.values())
            seconds[name].append(clocked.step_s)
    first, *others = settings
    figures: Figures = {f"{name}_ms": 1000 * min(taken) for name, taken in seconds.items()}
    for name in others:
        figures[f"{name}_difference"] = difference = furthest(losses[name][:1], losses[first][:1])
        require(difference <= LARGEST[name], f"losses of {name} differ by {difference:.2g} from those of {first}")
    return figures


def ahead(setting: Setting) -> Figures:
    """Trains a GPT whose fused optimizer is launched before the host reads the loss, and after: equal losses, and the
    milliseconds of a step."""
    # Of longer texts, flash attention's backward pass adds in an order that differs between runs.
    sizes = {"width": 1024, "blocks": 12, "heads": 16, "length": 128} if setting.on_gpu else {}
    steps = WARM + (20 if setting.on_gpu else 4)
    seconds: dict[str, list[float]] = {"after": [], "ahead": []}
    losses, launched = {}, list[bool]()
    plain, launch = OptimizerStep.can_step_ahead, OptimizerStep.step_ahead

    def noted(self: OptimizerStep, *given: Any) -> None:
        launched.append(True)
        launch(self, *given)

    try:
        OptimizerStep.step_ahead = noted  # type: ignore[assignment,method-assign]
        for turn in range(2):
            for name, taken in seconds.items():
                OptimizerStep.can_step_ahead = plain if name == "ahead" else False  # type: ignore[assignment,method-assign]
                clocked = Clocked(WARM, steps, setting.on_gpu)
                config = run_file(
                    setting.folder / f"{name}-{turn}", "gpt", {**sizes, "fused": True}, steps, 8,
                    train={"precision": "bf16", "clip_norm": 1.0}, checkpoint={"enabled": False},
                    track={"every_steps": WARM},
                )  # fmt: skip
                losses[name] = list(trained(config, [clocked]).of_step.values())
                taken.append(clocked.step_s)
    finally:
        OptimizerStep.can_step_ahead, OptimizerStep.step_ahead = plain, launch  # type: ignore[method-assign]
    require(losses["ahead"] == losses["after"], "losses differ")
    require(len(launched) == (2 * steps if setting.on_gpu else 0), f"{len(launched)} steps were launched ahead")
    return {f"{name}_ms": 1000 * min(taken) for name, taken in seconds.items()}


def fused(setting: Setting) -> Figures:
    """Updates a GPT's weights by AdamW as a run file names it, and by PyTorch's default for the device."""
    sizes: dict[str, Any] = {"width": 1024, "blocks": 12, "heads": 16} if setting.on_gpu else {}
    found: dict[str, tuple[float, list[torch.Tensor]]] = {}
    for name in ("default", "fused"):
        model = tasks.gpt(**sizes).model.to(device_of(setting.on_gpu))
        named = make_optimizer("adamw", {"lr": 1e-3}, model)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = named if name == "fused" else plain
        assert optimizer is not None, "the model is a module"
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel(), device=parameter.device).view_as(parameter)
        fastest = float("inf")
        for _ in range(10):
            finish(setting.on_gpu)
            began = time.perf_counter()
            optimizer.step()
            finish(setting.on_gpu)
            fastest = min(fastest, time.perf_counter() - began)
        found[name] = fastest, [parameter.detach() for parameter in model.parameters()]
    furthest_apart = max(
        float((one - other).abs().max()) for one, other in zip(found["fused"][1], found["default"][1], strict=True)
    )
    require(furthest_apart <= 1e-5, f"weights differ by {furthest_apart:.2g}")  # 10 updates of 1e-3 in fp32
    return {**{f"{name}_ms": 1000 * taken for name, (taken, _) in found.items()}, "difference": furthest_apart}

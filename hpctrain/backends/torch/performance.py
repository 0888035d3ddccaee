"""Counts a model's operations in one forward pass and measures the device's peak rate, only at the start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import isnan, nan
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._ops import HigherOrderOperator
from torch.nn import Bilinear, Module, RNNBase
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.device import Compute
from hpctrain.train import flops
from hpctrain.train.data_sheets import sheet_per_s

Found = TypeVar("Found")
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
UNCOUNTED = (RNNBase, Bilinear)
"""Layers whose kernels the counter does not support."""


def on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of a fused attention kernel, from the shapes of its inputs."""
    return int(sdpa_flop_count(query, key, value))


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: on_cpu}
"""Attention kernels of CPUs; the counter supports those of GPUs."""


class WithFlexAttention(TorchDispatchMode):
    """Counts FlexAttention, at which PyTorch's counter fails; Dynamo cannot compile it after that failure."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.formulas = counter.flop_registry
        self.operations: float = 0
        """NaN if PyTorch does not know them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (isinstance(func, HigherOrderOperator) and func.name().startswith("flex_attention")):
            return func(*args, **kwargs)
        with _disable_current_modes():
            found = func(*args, **kwargs)
        formula = self.formulas.get(func)
        self.operations += formula(*args, **kwargs, out_val=found) if formula else nan
        return found


def trying(
    call: Callable[[], Found], model: Module, samples: int, computes_in: torch.dtype | None, is_collective: bool = False
) -> tuple[Found, flops.Flops | None]:
    """Makes a call that includes a forward pass of the model, and counts its operations.

    Errors of the counter do not affect the call.

    Args:
        call: the call; repeated without counting if it fails. Its errors propagate.
        model: the model.
        samples: number of samples in the pass.
        computes_in: dtype of matrix products if it is not that of the parameters.
        is_collective: whether other ranks take part, so it is made only once and may compute nothing on this rank.

    Returns:
        The call's result, and the operations; None for these if unknown: unsupported layers or frozen weights.
    """
    parameters = list(model.parameters())
    every = parameters and all(one.requires_grad for one in parameters)
    if not every or samples == 0 or any(isinstance(one, UNCOUNTED) for one in model.modules()):
        return call(), None
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    try:
        with counter, WithFlexAttention(counter) as flex, torch.compiler.set_stance("force_eager"):
            found = call()
    except Exception:  # of the counter, or of the call, which then raises it again
        if is_collective:
            raise
        return call(), None
    per_sample = 3 * (counter.get_total_flops() + flex.operations) / samples
    if isnan(per_sample) or (not per_sample and not is_collective):  # possible for a part of a model
        return found, None
    largest = max(parameters, key=lambda one: one.numel())
    device, dtype = largest.device, computes_in or largest.dtype
    kind = KINDS.get(dtype, "")
    if kind == "fp32" and accelerator.has_tf32(device) and allows_tf32():
        kind = "tf32"
    sheet = 0.0 if device.type == "cpu" else sheet_per_s(accelerator.name(device), kind)
    return found, flops.Flops(per_sample, peak_per_s(device, dtype), sheet)


def allows_tf32() -> bool:
    """Whether matrix products in float32 may use TF32, by either of PyTorch's settings."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # PyTorch 2.9 and newer do not say so if the task has used the newer one
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def peak_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Peak rate in operations/s: the fastest of several matrix products. Draws no random numbers."""
    size = flops.CPU_SIZE if device.type == "cpu" else flops.GPU_SIZE
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    out = torch.empty_like(left)
    synchronize = Compute(device).synchronize  # allowed only before training
    synchronize()

    def multiply() -> None:
        torch.mm(left, left, out=out)
        synchronize()

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return flops.peak_per_s(multiply, size)


class TorchProfiler:
    """See train.watchers.Profiler. Writes ``<target>.pt.trace.json``. Ranges are also ranges of NVTX, for nsys."""

    def __init__(self) -> None:
        self.range = ExitStack()

    def show(self, name: str) -> None:
        self.range.close()
        if name:
            self.range.enter_context(record_function(name))
            self.range.enter_context(accelerator.nvtx(name))

    def start(self, target: Path) -> None:
        self.target, self.running = target, profile(activities=accelerator.activities())
        self.running.start()

    def stop(self) -> None:
        self.running.stop()
        self.running.export_chrome_trace(f"{self.target}.pt.trace.json")

    def abandon(self) -> None:
        self.running.stop()

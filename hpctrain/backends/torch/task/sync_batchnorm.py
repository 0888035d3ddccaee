"""BatchNorm over the samples of all ranks. Modules keep their class; only their statistics in training change."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.backends.joint_statistics import JointStatistics
from hpctrain.backends.torch.reduce.reducer import broadcast
from hpctrain.backends.torch.strategies.region import HALVES
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.clock import IntervalClock, StepClock


def wants_joint_statistics(model: Module, configured: bool) -> bool:
    """Whether the run file asks for it, or all BatchNorm layers of the model are ``torch.nn.SyncBatchNorm``.

    Raises:
        UserError: only some of them are, and these cannot be distinguished from the others.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return configured  # by the task: SyncBatchNorm then communicates itself
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    own = [name for name, module in layers.items() if isinstance(module, torch.nn.SyncBatchNorm)]
    if own and len(own) < len(layers) and not configured:
        raise UserError(
            f"{own[0] or 'the model'} is a SyncBatchNorm, and other layers of the model are BatchNorm",
            "set train.sync_batchnorm: true, which normalises over all ranks in each of them, or make all of one kind",
        )
    return configured or bool(own)


def joint_names(model: Module) -> frozenset[str]:
    """Names of the buffers that are then equal on all ranks: running statistics and their counters."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_buffers(recurse=False)
    )


class SyncBatchNorm(JointStatistics):
    """Makes a model's BatchNorm layers normalise over the samples of all ranks in training.

    Args:
        model: the model, on its device.
        group: the ranks that see different samples; more than one.
        clock: records the time spent waiting.
    """

    def __init__(self, model: Module, group: Group, clock: StepClock) -> None:
        super().__init__(group, clock)
        self.model, self.names = model, joint_names(model)

    def passes(self) -> OverRanks:
        return OverRanks(self)

    def trial(self) -> OverRanks:
        """Context for a dry call: not collective, and a single sample is enough."""
        return OverRanks(JointStatistics(Group("alone"), IntervalClock()), fewest=1)

    def follow(self) -> None:
        """Sets running statistics to those of rank 0. Collective."""
        buffers = [buffer for name, buffer in self.model.named_buffers() if name in self.names]
        broadcast(self.everyone, buffers, "follow BatchNorm's statistics")


class OverRanks:
    """Context in which ``torch.nn.functional.batch_norm`` in training normalises over the samples of all ranks.

    All BatchNorm modules call that function, including ``torch.nn.SyncBatchNorm``, also during the recomputation of
    checkpointed layers in the backward pass, which on a GPU runs on another thread.

    Args:
        statistics: joins statistics over the ranks.
        fewest: smallest number of values per channel over all ranks that can be trained on.
    """

    def __init__(self, statistics: JointStatistics, fewest: int = 2) -> None:
        self.statistics, self.fewest = statistics, fewest
        self.own = functional.batch_norm

    def __enter__(self) -> None:
        functional.batch_norm = self.batch_norm

    def __exit__(self, *_: object) -> None:
        functional.batch_norm = self.own

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """See torch.nn.functional.batch_norm. Collective if ``training``."""
        if not training:
            return self.own(input, running_mean, running_var, weight, bias, False, momentum, eps)
        outputs, mean, variance, count = Normalized.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, eps, self.statistics
        )
        if count < self.fewest:
            raise UserError(
                "BatchNorm has one value per channel on all ranks together, which has no variance",
                "make train.global_batch larger or train.accumulate smaller, or set data.drop_last: true",
            )
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((variance * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
        return outputs  # type: ignore[no-any-return]


class Normalized(torch.autograd.Function):
    """Computes outputs, and mean, biased variance and count per channel over all ranks, in float32 or float64."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: JointStatistics
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        values = wide(input)
        count = values.numel() // max(values.shape[1], 1)
        if count:
            variance, mean = torch.var_mean(values, axes(values), correction=0)
        else:
            variance = mean = values.new_zeros(values.shape[1])
        found = statistics.merge(count, on_host(mean), on_host(variance * count))
        mean = torch.from_numpy(found.mean).to(values)
        variance = torch.from_numpy(found.squares / max(found.count, 1)).to(values)
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.joint = statistics, found.count, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance)
        outputs = (values - along(mean, values)) * along(inverse if weight is None else inverse * weight, values)
        if bias is not None:
            outputs += along(bias, values)
        return outputs.to(input.dtype), mean, variance, found.count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        statistics, count, bias_dtype = ctx.joint
        slopes = wide(gradient)
        normalized = (wide(input) - along(mean, input)) * along(inverse, input)
        sums = torch.stack([slopes.sum(axes(slopes)), (slopes * normalized).sum(axes(slopes))])
        of_input = of_weight = of_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = sums[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = sums[0].to(bias_dtype)
        if ctx.needs_input_grad[0]:
            total = torch.from_numpy(statistics.add(on_host(sums.reshape(-1)))).to(slopes).view_as(sums) / count
            scale = inverse if weight is None else inverse * weight
            of_input = slopes - along(total[0], slopes) - normalized * along(total[1], slopes)
            of_input = (of_input * along(scale, slopes)).to(input.dtype)
        return of_input, of_weight, of_bias, None, None


def wide(values: Tensor) -> Tensor:
    """Casts half precision to float32."""
    return values.float() if values.dtype in HALVES else values


def axes(values: Tensor) -> list[int]:
    """All axes but the second, that of the channels."""
    return [0, *range(2, values.ndim)]


def along(channels: Tensor, like: Tensor) -> Tensor:
    """Reshapes one value per channel to broadcast against ``like``."""
    return channels.view(1, -1, *[1] * (like.ndim - 2))


def on_host(values: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Copies values to the host as float64; waits for a GPU."""
    return values.detach().to("cpu", torch.float64).numpy()

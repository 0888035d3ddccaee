"""BatchNorm over the samples of all ranks. Modules keep their class; only their statistics in training change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.backends.joint_statistics import JointStatistics
from hpctrain.backends.torch.process_groups import ProcessGroup, broadcast, have_own_gpus, peers_of
from hpctrain.backends.torch.strategies.tp_group import HALVES
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.clock import IntervalClock, Phase, StepClock


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
        name
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_buffers(path, recurse=False)
    )


class SyncBatchNorm(JointStatistics):
    """Makes a model's BatchNorm layers normalise over the samples of all ranks in training.

    Args:
        model: the model, on its device.
        group: the ranks that see different samples; more than one.
        clock: records the time spent waiting.
        device: device of the model.
    """

    def __init__(self, model: Module, group: Group, clock: StepClock, device: torch.device) -> None:
        super().__init__(group, clock)
        self.model, self.names = model, joint_names(model)
        on_gpus = device.type != "cpu" and have_own_gpus(group, device)
        self.on_device = OnDevice(self, group, device) if on_gpus else None

    def passes(self) -> OverRanks:
        return OverRanks(self, on_device=self.on_device)

    def close(self) -> None:
        if self.on_device is not None:
            self.on_device.close()
        super().close()

    def trial(self) -> OverRanks:
        """Context for a dry call: not collective, and a single sample is enough."""
        return OverRanks(JointStatistics(Group("alone"), IntervalClock()), fewest=1)

    def follow(self) -> None:
        """Sets running statistics to those of rank 0. Collective."""
        buffers = [buffer for name, buffer in self.model.named_buffers() if name in self.names]
        broadcast(self.everyone, buffers, "follow BatchNorm's statistics")


@dataclass(eq=False)
class OverRanks:
    """Context in which ``torch.nn.functional.batch_norm`` in training normalises over the samples of all ranks.

    All BatchNorm modules call that function, including ``torch.nn.SyncBatchNorm``, also during the recomputation of
    checkpointed layers in the backward pass, which on a GPU runs on another thread.
    """

    statistics: JointStatistics
    """Joins statistics over the ranks."""
    fewest: int = 2
    """Smallest number of values per channel over all ranks that can be trained on."""
    on_device: OnDevice | None = None
    """Exchanges statistics between GPUs; None if they go through the host."""

    def __post_init__(self) -> None:
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
        if self.on_device is not None:
            return OnGpus.apply(  # type: ignore[no-any-return, no-untyped-call]
                input, weight, bias, running_mean, running_var, momentum, eps, self.on_device
            )
        outputs, mean, variance, count = Normalized.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, eps, self.statistics
        )
        if count < self.fewest:
            raise one_value()
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((variance * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
        return outputs  # type: ignore[no-any-return]


def one_value() -> UserError:
    """The error for statistics of too few values."""
    return UserError(
        "BatchNorm has one value per channel on all ranks together, which has no variance",
        "make train.global_batch larger or train.accumulate smaller, or set data.drop_last: true",
    )


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


NEXT_TO_NONE = 1e-30
"""In place of a count of 0, by which PyTorch's kernel would divide if the first ranks have no values."""
WHAT = "exchange BatchNorm statistics"
"""Completes "waited for the other ranks to ..." in errors."""


@dataclass(eq=False)
class OnDevice:
    """Exchanges statistics between the GPUs of the ranks that take part in a micro-batch; no host waits.

    That all are in the same layer is not checked, as with ``torch.nn.SyncBatchNorm``: it would take such a wait.
    """

    joint: JointStatistics
    """Knows which ranks take part."""
    group: Group
    """All ranks, whose process group gradients use as well."""
    device: torch.device
    """The rank's GPU."""
    peers: dict[Group, ProcessGroup] = field(default_factory=dict)

    def among(self) -> ProcessGroup:
        """The process group of the ranks that take part. Collective among them if it is new."""
        part = self.group if self.joint.group.size == self.group.size else self.joint.group
        if part not in self.peers:
            self.peers[part] = peers_of(part, self.device)
        return self.peers[part]

    @contextlib.contextmanager
    def meeting(self) -> Iterator[ProcessGroup]:
        """Around one exchange; its time is that of waiting for others."""
        self.joint.clock.mark(Phase.BACKWARD)
        if self.joint.agree is not None:
            self.joint.agree()
        yield self.among()
        self.joint.clock.mark(Phase.EXCHANGE)

    def gather(self, own: Tensor) -> Tensor:
        """The values of all ranks that take part; [ranks, values]."""
        with self.meeting() as peers:
            return peers.gather(own, WHAT)

    def add(self, values: Tensor) -> None:
        """Adds the values of all ranks that take part, in place."""
        with self.meeting() as peers:
            peers.sum(values, WHAT)()

    def close(self) -> None:
        """Closes process groups."""
        for peers in self.peers.values():
            peers.close()


class OnGpus(torch.autograd.Function):
    """Normalises by PyTorch's kernels, as ``torch.nn.SyncBatchNorm`` does, and updates running statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        on_device: OnDevice,
    ) -> Tensor:
        input = input if is_channels_last(input) else input.contiguous()
        channels = input.shape[1]
        if input.numel():
            mean, inverse = torch.batch_norm_stats(input, eps)
        else:  # kernels cannot be launched for nothing
            mean, inverse = wide(input).new_zeros(channels), wide(input).new_ones(channels)
        count = mean.new_full((1,), input.numel() // channels or NEXT_TO_NONE)
        means, inverses, counts = on_device.gather(torch.cat([mean, inverse, count])).split([channels, channels, 1], 1)
        counts = counts.flatten()
        if input.numel() < 2 * channels and counts.sum() < 2:  # read only by ranks that may have the only value
            raise one_value()
        # The kernel takes all of one dtype, and 16 bits hold no count.
        wide_mean, wide_var = (one if one is None else one.to(counts.dtype) for one in (running_mean, running_var))
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            input, means, inverses, wide_mean, wide_var, momentum, eps, counts
        )
        for own, updated in ((running_mean, wide_mean), (running_var, wide_var)):
            if own is not None and updated is not None and updated is not own:
                own.copy_(updated)
        ctx.save_for_backward(input, weight, mean, inverse, counts.to(torch.int32))
        ctx.on_device, ctx.has_bias = on_device, bias is not None
        return torch.batch_norm_elemt(input, weight, bias, mean, inverse, eps) if input.numel() else input.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, counts = ctx.saved_tensors
        gradient = gradient if is_channels_last(gradient) else gradient.contiguous()
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        if input.numel():
            total, total_scaled, for_weight, for_bias = torch.batch_norm_backward_reduce(
                gradient, input, mean, inverse, weight, of_input, of_weight, of_bias
            )
        else:
            total, total_scaled, for_weight, for_bias = mean.new_zeros(4, len(mean))
        for_input = None
        if of_input:
            sums = torch.cat([total, total_scaled])
            ctx.on_device.add(sums)
            total, total_scaled = sums.chunk(2)
            weight = weight if weight is None else weight.to(mean.dtype)
            for_input = gradient
            if input.numel():
                for_input = torch.batch_norm_backward_elemt(
                    gradient, input, mean, inverse, weight, total, total_scaled, counts
                )
        has_weight = weight is not None and of_weight
        return for_input, for_weight if has_weight else None, for_bias if of_bias else None, *[None] * 5


def is_channels_last(values: Tensor) -> bool:
    """Whether the channels are the innermost axis of images or volumes in memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return values.ndim in formats and values.is_contiguous(memory_format=formats[values.ndim])


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

"""Times each layer of a model, forward and backward, before it is divided into stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.state.torch_state import passes_leave
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.strategies.pipeline.pipelined import only_value
from hpctrain.backends.torch.strategies.pipeline.stage import Entered, described, rebuilt
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import StageChoice, agreed_times
from hpctrain.backends.torch.strategies.pipeline.stages import Layer, Stages, as_before, staged
from hpctrain.backends.torch.task.checks import try_loss
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.comm.world import World
from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask, kept_objects
from hpctrain.train.framework import HostBatch, copied, samples_of

WITH_NEXT = 0.0
"""Recorded for a layer that must be in the same stage as the next one, and is timed together with it."""


@dataclass(frozen=True)
class Whole:
    """A task's model before ranks keep only their stages."""

    task: TorchTask
    model: Module
    """The whole model, or this rank's part of it with tensor parallelism."""
    task_state: TaskState
    partition: Partition
    """The part of the model that this rank has."""
    compute: Compute

    def chosen(self, stages: Stages, choice: StageChoice, world: World) -> Stages:
        """The stages to use: those that the task gives, those of an earlier attempt, or balanced ones. Collective.

        Leaves the model and random states as they were.

        Args:
            stages: as given by the task, or balanced by the number of parameters.
            choice: knows an earlier attempt's stage sizes, and the batch to time layers with.
            world: all ranks.

        Raises:
            UserError: the errors of ``dry_call`` and ``staged``.
        """
        if stages.are_given or choice.batch is None:
            return stages
        before = as_before(self.model, stages, choice.kept)
        if before is not None:
            return before
        with passes_leave(self.model, self.task_state, kept_objects(self.task), self.compute.device):
            batch = choice.batch()
            seconds = agreed_times(lambda: self._one_pass(stages.layers, batch), world.everyone)
        if seconds:
            chunks = len(stages.ranges) // stages.ranks
            stages = staged(self.model, stages.layers, stages.ranks, chunks, seconds, together(seconds))
        if choice.record is not None:
            choice.record(stages.counts, seconds)
        return stages

    def _one_pass(self, layers: Sequence[Layer], host: HostBatch) -> list[float] | None:
        """Seconds of each layer, WITH_NEXT for one whose output cannot be sent between stages; None on a rank without
        samples, or if the model has no values."""
        if not host or not samples_of(host) or any(one.is_meta for one in self.model.parameters()):
            return None
        batch = self.compute.tensors(copied(host))
        timed = Timed(layers, self.model, self.compute)
        try:
            with self.compute.autocast(cache_enabled=False):
                loss = try_loss(self.task, timed, batch, self.partition.hint)
            timed.end_layer([loss])
        finally:
            self.partition.leave()
        return timed.seconds


class Timed:
    """Replaces a model and times its layers one by one, holding activations and gradients of one layer at a time.

    What ``forward`` does with the outputs, and the loss, count towards the last layer.

    Args:
        layers: layers of the model, in order.
        model: has their parameters.
        compute: the model's device and precision.
    """

    training = True

    def __init__(self, layers: Sequence[Layer], model: Module, compute: Compute) -> None:
        self.layers, self.compute = layers, compute
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.seconds: list[float] = []
        self.began = 0.0
        self.wanted: list[Tensor] = []
        """Tensors whose gradients the current layer's backward pass computes."""

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """Runs all layers; returns the outputs of the last one, whose timing has not ended yet."""
        value = only_value(inputs, more, again=bool(self.began))
        going_on = False
        for number, layer in enumerate(self.layers):
            own = [one for one in self.parameters if id(one) in layer.held]
            if going_on:
                self.wanted += own
            else:
                value = self._begin_layer(own, value)
            value = layer.call(value)
            if number < len(self.layers) - 1:
                outputs = tensors_in(value)
                going_on = outputs is None
                if outputs is None:
                    self.seconds.append(WITH_NEXT)
                else:
                    self.end_layer(outputs)
        return value

    def _begin_layer(self, own: Sequence[Tensor], value: Any) -> Any:
        """Starts timing a layer with these parameters; returns its input, detached from the layers before."""
        tensors = tensors_in(value)
        self.wanted = [*own]
        if tensors is not None:  # else it is the first layer's input, which is not sent between stages
            value = rebuilt(described(value, []), self._cut_off(tensors))
        self.compute.synchronize()
        self.began = time.perf_counter()
        return value

    def _cut_off(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors as if they had been received from another rank."""
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        cut_off = [one.detach() for one in tensors]
        entering = [number for number, one in enumerate(tensors) if one.requires_grad]
        if entering:
            entered = Entered.apply(anchor, [cut_off[number] for number in entering], [])  # type: ignore[no-untyped-call]
            for number, one in zip(entering, entered, strict=True):
                cut_off[number] = one
            self.wanted.append(anchor)
        return cut_off

    def end_layer(self, outputs: Sequence[Tensor]) -> None:
        """Runs the current layer's backward pass and records its time."""
        back = [one for one in outputs if one.requires_grad]
        if back and self.wanted:
            torch.autograd.grad(back, self.wanted, [torch.ones_like(one) for one in back], allow_unused=True)
        self.compute.synchronize()
        self.seconds.append(time.perf_counter() - self.began)


def tensors_in(value: Any) -> list[Tensor] | None:
    """All tensors that a layer returns, each once; None if its output cannot be sent between stages."""
    tensors: list[Tensor] = []
    try:
        described(value, tensors)
    except UserError:
        return None
    return tensors


def together(seconds: Sequence[float]) -> list[bool]:
    """Whether each layer must be in the same stage as the previous one."""
    return [False, *(each == WITH_NEXT for each in seconds[:-1])]

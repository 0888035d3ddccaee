"""The program of a task with a model and a loss: passes, exchange, update."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from hpctrain.backends.joint_statistics import BatchNorms
from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.performance import trying
from hpctrain.backends.torch.steps.batch_metrics import BatchMetrics
from hpctrain.backends.torch.steps.updates import GradientAccumulation, OptimizerStep, ReducerByOptimizer, wait_for_all
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.task.checks import try_loss
from hpctrain.backends.torch.task.shares import ONLY
from hpctrain.backends.update import NotFinite, UpdateResult, ranks_at_fault
from hpctrain.comm.world import World
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import ChosenReducer
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import NO_CLOCK, Phase, StepClock
from hpctrain.train.evaluation import even_passes
from hpctrain.train.flops import Flops
from hpctrain.train.framework import HostBatch, copied, samples_of
from hpctrain.train.state import ArrayTensor


class ForwardBackward(Protocol):
    """Runs the forward and backward passes of updates on this rank."""

    model: Any
    """What a task's ``forward`` gets as the model."""
    is_collective: bool
    """Whether forward passes are collective."""

    def run(self, accumulation: GradientAccumulation, micro_batches: Sequence[HostBatch], clock: StepClock) -> None:
        """Runs all passes of an update. Collective if passes are.

        Args:
            accumulation: takes the loss of each pass, and runs its backward pass.
            micro_batches: this rank's micro-batches.
            clock: records where time goes.
        """

    def dry_call(self, batch: dict[str, Tensor]) -> Any:
        """Runs a forward pass as in an update; returns its loss. Raises UserError naming the task's field at fault."""


@dataclass(eq=False)
class PlainForwardBackward:
    """Passes through a model that is called directly; see ForwardBackward."""

    parts: StepParts
    loss: Any
    """The task's loss, as it is called in training."""

    def __post_init__(self) -> None:
        several = isinstance(self.parts.task.model, Mapping)
        self.model: Any = self.parts.models if several else self.parts.models["model"]
        self.is_collective = self.parts.partition.is_collective

    def run(self, accumulation: GradientAccumulation, micro_batches: Sequence[HostBatch], clock: StepClock) -> None:
        compute = self.parts.compute
        partition = self.parts.partition
        batches, everyones = even_passes(micro_batches, partition.sync_group)
        for number, (host, is_own) in enumerate(batches, start=1):
            self.parts.batch_norms.begin_micro_batch(number - 1)
            batch = compute.tensors(host)
            clock.mark(Phase.TO_DEVICE)
            accumulation.reducer.begin_pass(is_last=False)  # gradients computed inside forward are not sent
            with contextlib.nullcontext() if is_own else self.parts.unchanged():
                score = self._score(accumulation, batch, host, is_own)
                partition.leave()
                clock.mark(Phase.FORWARD)
                accumulation.reducer.begin_pass(is_last=number == len(batches), goes_on=number < everyones)
                accumulation.add(score, samples_of(host), is_own=is_own)
            clock.mark(Phase.BACKWARD)
        if not micro_batches:
            clock.mark(Phase.BACKWARD)  # without micro-batches the rank arrives at once

    def _score(
        self, accumulation: GradientAccumulation, batch: Mapping[str, Tensor], host: HostBatch, is_own: bool
    ) -> Any:
        """The loss of a batch; the outputs are not kept."""
        with self.parts.compute.autocast():
            outputs = self.parts.task.forward(self.model, batch)
            score = self.loss(outputs, batch)
        if is_own:
            accumulation.see(outputs, batch, host)
        return score

    def dry_call(self, batch: dict[str, Tensor]) -> Any:
        parts = self.parts

        def again(some: Mapping[str, Tensor]) -> Any:
            parts.modes.evaluate()
            try:
                return parts.task.forward(self.model, some)
            finally:
                parts.modes.train()

        return try_loss(parts.task, self.model, batch, parts.partition.hint, None if self.is_collective else again)


class UpdateStep:
    """The program of a task with a model and a loss.

    Args:
        parts: the common parts of programs.
        forward_backward: runs the forward and backward passes.
    """

    counters: Sequence[ArrayTensor] = ()
    """What the program counts across resumes."""

    def __init__(self, parts: StepParts, forward_backward: ForwardBackward) -> None:
        self.parts = parts
        self.forward_backward = forward_backward
        self.updates = 0
        """Updates since the task was built."""

    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        parts = self.parts
        clock = parts.clock
        optimizer_step = parts.optimizer_steps[ONLY]
        parts.modes.train()
        rehearse = functools.partial(self._rehearse, micro_batches, global_samples)
        reducer = parts.reducers.chosen(rehearse).of[ONLY]
        self.updates += 1
        accumulation = GradientAccumulation(reducer, optimizer_step.rule.scale, global_samples, parts.metrics)
        with parts.batch_norms.update(len(micro_batches)):
            self.forward_backward.run(accumulation, micro_batches, clock)
            weighted = accumulation.weighted or not micro_batches  # then this rank cannot know
            has_stepped = optimizer_step.begin_ahead(reducer, clock, weighted)
            totals, loss = accumulation.exchange()
        clock.mark(Phase.EXCHANGE)
        exact = loss if parts.compute.device.type == "cpu" else None  # GPU kernels may add in any order
        parts.partition.require_same_update(exact, reducer, self.updates, parts.world.everyone)
        try:
            decision = optimizer_step.update(reducer, totals, clock, has_stepped)
        except NotFinite as error:
            raise ranks_at_fault(error, parts.world.data, math.isfinite(loss[0])) from None
        clock.mark(Phase.OPTIMIZER)
        return UpdateResult.of(loss, decision.norm, accumulation.scores)

    def dry_call(self, batch: HostBatch) -> Flops | None:
        """Tries passes on a batch; returns the FLOPs of training if they can be counted. Raises UserError."""
        compute = self.parts.compute

        def call() -> Any:
            return self.forward_backward.dry_call(compute.tensors(copied(batch)))

        samples, is_collective = samples_of(batch), self.forward_backward.is_collective
        loss, flops = trying(call, self.parts.model, samples, compute.low_precision, is_collective)
        if loss is not None:  # stages hide the model from the loss
            self.parts.partition.try_loss(loss)
        return flops

    def close(self) -> None:
        """Nothing to release."""

    def _rehearse(self, micro_batches: Sequence[HostBatch], global_samples: int, reducers: ReducerByOptimizer) -> None:
        parts, reducer = self.parts, reducers.of[ONLY]
        copies = list(map(copied, micro_batches))  # a task may change its inputs in place
        accumulation = GradientAccumulation(reducer, parts.optimizer_steps[ONLY].rule.scale, global_samples)
        with parts.batch_norms.update(len(copies)):
            self.forward_backward.run(accumulation, copies, NO_CLOCK)
            accumulation.exchange()
            wait_for_all(reducer, NO_CLOCK)


@dataclass
class Modes:
    """Switches a model between training and evaluation; modules that the task keeps in evaluation mode stay in it."""

    model: Module
    frozen: list[Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.untrained = [(name, one) for name, one in self.model.named_parameters() if not one.requires_grad]
        """Frozen parameters, which are in no reducer."""

    def train(self) -> None:
        """Switches to training. Raises UserError if a parameter has been unfrozen since the start."""
        if (thawed := next((name for name, one in self.untrained if one.requires_grad), None)) is not None:
            raise UserError(
                f"{thawed} of the model was unfrozen after the run had started, so its gradients would not be averaged",
                "leave requires_grad on in the task, and switch it off and on later, in before_fit or a step of a hook",
            )
        if not self.model.training:
            self.model.train()
            for module in self.frozen:
                module.training = False

    def evaluate(self) -> None:
        """Switches to evaluation."""
        if self.model.training:
            self.frozen = [module for module in self.model.modules() if not module.training]
            self.model.eval()


@dataclass(frozen=True)
class StepParts:
    """What step programs and evaluations share."""

    task: TorchTask
    model: Module
    """All models of the task as one module."""
    models: Mapping[str, Any]
    """Each model by name, as it is called."""
    world: World
    compute: Compute
    clock: StepClock
    modes: Modes
    partition: Partition
    """Which part of the model this rank has."""
    batch_norms: BatchNorms
    optimizer_steps: Mapping[str, OptimizerStep]
    """By optimizer."""
    reducers: ChosenReducer[ReducerByOptimizer]
    """Sum the gradients over ranks."""
    unchanged: Callable[[], contextlib.AbstractContextManager[None]]
    """A context that undoes what passes change."""
    metrics: BatchMetrics | None = None
    """Metrics of training batches, if there are any."""

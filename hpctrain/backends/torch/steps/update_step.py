"""What a framework runs in each update; and the program of a task with a model and a loss: passes, exchange, update."""

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
from hpctrain.backends.torch.reduce.reducer import FlatReducer
from hpctrain.backends.torch.steps.updates import Exchanges, Passes, Trained
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.task.checks import try_loss
from hpctrain.backends.torch.task.shares import ONLY
from hpctrain.backends.update import NotFinite, UpdateResult, ranks_at_fault
from hpctrain.comm.world import World
from hpctrain.reduce.layout import ExchangeResult
from hpctrain.reduce.reducer_choice import ChosenReducer
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import NO_CLOCK, Phase, StepClock
from hpctrain.train.evaluation import even_batches
from hpctrain.train.flops import Flops
from hpctrain.train.framework import HostBatch, StepResult, copied, samples_of
from hpctrain.train.state import ArrayTensor


class PassRunner(Protocol):
    """Runs the passes of updates on this rank."""

    called: Any
    """What a task's ``forward`` gets as the model."""
    uncompiled: Any
    """The same for dry calls."""
    meets: bool
    """Whether other ranks take part in forward passes."""

    def begin(self, micro_batches: Sequence[HostBatch]) -> None:
        """Looks at those of the first update. Collective. Raises UserError if they cannot be those of one update."""

    def run(self, passes: Passes, micro_batches: Sequence[HostBatch], clock: StepClock) -> None:
        """All passes of an update. Collective if ranks meet in them.

        Args:
            passes: take the losses.
            micro_batches: this rank's.
            clock: records where the time goes.
        """

    def dry_call(self, batch: dict[str, Tensor]) -> Any:
        """A forward pass as in an update: its loss. Raises UserError naming the field of the task at fault."""

    def try_loss(self, loss: Any) -> None:
        """Raises UserError if a loss of ``dry_call`` cannot be differentiated. Collective."""


@dataclass(eq=False)
class LossPasses:
    """Passes through a model that is called as it is; see PassRunner."""

    parts: Parts

    def __post_init__(self) -> None:
        several = isinstance(self.parts.task.model, Mapping)
        self.called: Any = self.parts.models if several else self.parts.models["model"]
        self.uncompiled: Any = self.parts.task.model
        self.meets = self.parts.partition.meets

    def begin(self, micro_batches: Sequence[HostBatch]) -> None:
        """Nothing: ranks see different samples."""

    def run(self, passes: Passes, micro_batches: Sequence[HostBatch], clock: StepClock) -> None:
        task, compute, partition = self.parts.task, self.parts.compute, self.parts.partition
        batches = list(even_batches(micro_batches, partition.sync_group))
        for number, (host, is_own) in enumerate(batches, start=1):
            self.parts.batch_norms.begin_micro_batch(number - 1)
            batch = compute.tensors(host)
            clock.mark(Phase.TO_DEVICE)
            passes.reducer.last_backward = False  # what forward itself derives stays here
            with contextlib.nullcontext() if is_own else self.parts.unchanged():
                with compute.autocast(), partition.passing():
                    score = task.loss(task.forward(self.called, batch), batch)
                partition.leave()
                clock.mark(Phase.FORWARD)
                passes.reducer.last_backward = number == len(batches)
                passes.add(score, samples_of(host), is_own=is_own)
                partition.finish(compute.device)
            clock.mark(Phase.BACKWARD)
        if not micro_batches:
            clock.mark(Phase.BACKWARD)  # nothing to do, and so arrived

    def dry_call(self, batch: dict[str, Tensor]) -> Any:
        parts, partition = self.parts, self.parts.partition
        with partition.passing():
            return try_loss(parts.task, self.uncompiled, batch, partition.hint)

    def try_loss(self, loss: Any) -> None:
        self.parts.partition.try_loss(loss)


class UpdateStep:
    """See StepProgram.

    Args:
        parts: what it is made of.
        passes: run forward and back.
    """

    counters: Sequence[ArrayTensor] = ()

    def __init__(self, parts: Parts, passes: PassRunner) -> None:
        self.parts, self.passes = parts, passes
        self.updates = 0

    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        parts, clock = self.parts, self.parts.clock
        parts.modes.train()
        if not self.updates:
            self.passes.begin(micro_batches)
        exchanges = parts.exchanges.measured(functools.partial(self._rehearse, micro_batches, global_samples))
        self.updates += 1
        reducer = exchanges.of[ONLY]
        if isinstance(reducer, FlatReducer) and isinstance(self.passes, LossPasses) and self.updates > 1:
            reducer.let_arrive_early(parts.trained[ONLY].by_parts and not self.passes.meets)
        with parts.batch_norms.update(len(micro_batches)):
            loss, totals = self._gradients(exchanges, micro_batches, global_samples, clock)
        clock.mark(Phase.EXCHANGE)
        if parts.compute.device.type == "cpu":  # kernels of GPUs may add in any order
            parts.partition.require_same_loss(loss, self.updates)
        if self.updates == 1:
            parts.partition.require_whole_gradients(reducer.summed(), parts.world.everyone)
        try:
            decision = parts.trained[ONLY].update(reducer, totals, clock)
        except NotFinite:
            raise ranks_at_fault(parts.world.data, math.isfinite(loss[0])) from None
        clock.mark(Phase.OPTIMIZER)
        return UpdateResult(loss, decision.norm)

    def dry_call(self, batch: HostBatch) -> Flops | None:
        compute = self.parts.compute

        def call() -> Any:
            return self.passes.dry_call(compute.tensors(copied(batch)))

        samples, meets = samples_of(batch), self.passes.meets
        loss, flops = trying(call, self.parts.model, samples, compute.low_precision, meets)
        self.passes.try_loss(loss)
        return flops

    def close(self) -> None:
        """Nothing of the task is held."""

    def _rehearse(self, micro_batches: Sequence[HostBatch], global_samples: int, exchanges: Exchanges) -> None:
        copies = list(map(copied, micro_batches))  # a task may change its inputs in place
        with self.parts.batch_norms.update(len(copies)):
            self._gradients(exchanges, copies, global_samples, NO_CLOCK)

    def _gradients(
        self, exchanges: Exchanges, micro_batches: Sequence[HostBatch], global_samples: int, clock: StepClock
    ) -> tuple[tuple[float, float], ExchangeResult]:
        """This rank's (loss sum, weight), and all ranks' totals."""
        passes = Passes(exchanges.of[ONLY], self.parts.trained[ONLY].rule.scale, global_samples)
        self.passes.run(passes, micro_batches, clock)
        totals = passes.exchange()
        return (float(passes.loss), float(passes.weight)), totals


class StepProgram(Protocol):
    """Makes updates."""

    @property
    def updates(self) -> int:
        """Since the task was made."""

    @property
    def counters(self) -> Sequence[ArrayTensor]:
        """Of the state: what the program counts over resumes."""

    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        """One update; see train.framework.Step."""

    def dry_call(self, batch: HostBatch) -> Flops | None:
        """Tries passes on a batch: what training on a sample takes, if that can be counted. Raises UserError."""

    def close(self) -> None:
        """Gives back what the task holds."""


@dataclass
class Modes:
    """Whether layers train. Those that the task keeps in evaluation mode (frozen statistics) stay in it."""

    model: Module
    frozen: list[Module] = field(default_factory=list)

    def train(self) -> None:
        """For an update."""
        if not self.model.training:
            self.model.train()
            for module in self.frozen:
                module.training = False

    def evaluate(self) -> None:
        """For an evaluation."""
        if self.model.training:
            self.frozen = [module for module in self.model.modules() if not module.training]
            self.model.eval()


@dataclass(frozen=True)
class Parts:
    """What step programs and evaluations share."""

    task: TorchTask
    model: Module
    """All models of the task as one."""
    models: Mapping[str, Any]
    """Each of them, as it is called."""
    world: World
    compute: Compute
    clock: StepClock
    modes: Modes
    partition: Partition
    """What of the model this rank has."""
    batch_norms: BatchNorms
    trained: Mapping[str, Trained]
    """By optimizer."""
    exchanges: ChosenReducer[Exchanges]
    """Of gradients."""
    unchanged: Callable[[], contextlib.AbstractContextManager[None]]
    """A context in which passes leave no trace."""

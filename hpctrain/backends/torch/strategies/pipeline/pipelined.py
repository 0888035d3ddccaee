"""One stage of a task's model: its passes in an update, and outputs on all stages."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.backends.torch.steps.update_step import StepParts
from hpctrain.backends.torch.steps.updates import GradientAccumulation
from hpctrain.backends.torch.strategies.pipeline.stage import OUTPUT, Coming, Received, Stage
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import Act, acts
from hpctrain.backends.torch.strategies.pipeline.stages import StageModel, is_chain
from hpctrain.backends.torch.strategies.split_values import own_stream
from hpctrain.backends.torch.task.checks import try_loss
from hpctrain.backends.torch.task.task_state import TaskState, attributes
from hpctrain.config.features import Feature, used
from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.evaluation import even_passes
from hpctrain.train.framework import HostBatch, copied, samples_of
from hpctrain.train.seeds import host_random_state, restore_host_random_state, seed_python
from hpctrain.train.stateful import PerRank
from hpctrain.train.walk_objects import reached

ONCE = "let forward call the model once, on one value, such as a tuple: each layer gets what the one before returned"


class HandedOn(BaseException):
    """Ends a task's ``forward`` on all but the last stage. Not an Exception, so the task's code does not catch it."""


@dataclass
class MicroBatch:
    """A micro-batch on its way through a stage of this rank, forward and back."""

    stage: Stage
    chunk: int
    """Index of the stage among those of this rank."""
    samples: int = 0
    is_own: bool = True
    """False for another rank's batch; see GradientAccumulation.add."""
    is_lent: bool = False
    """Whether a rank computes with another's batch in this pass."""
    coming: Coming | None = None
    """Activations, or later gradients, that are being received."""
    received: Received | None = None
    """What came from the previous stage."""
    is_called: bool = False
    """Whether the task's ``forward`` has called the model."""
    value: Any = None
    """What the stage returned, until it is sent."""
    sent: Sequence[Tensor] = ()
    """Tensors sent to the next stage that will get gradients."""
    score: Any = None
    """The loss, on the last stage."""

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last one."""
        return self.stage.is_last(self.chunk)

    def begin(self, forward: bool = True) -> None:
        """Begins to receive activations, unless the stage is the first, or gradients."""
        if not forward:
            self.coming = self.stage.begin_gradients(self.sent, self.chunk)
        elif not self.stage.is_first(self.chunk):
            self.coming = self.stage.begin(self.chunk)

    def through(self, layers: Callable[[Any, int], Any], value: Any) -> Any:
        """What the stage returns for the input of the model, or for what it receives."""
        self.is_called = True
        if self.coming is not None:
            self.received, self.coming = self.stage.receive(self.coming), None
            value = self.received.value
        self.value = layers(value, self.chunk)
        return self.value

    def keep_loss(self, score: Any) -> None:
        """Keeps the loss for the backward pass."""
        self.score = score

    def backward(self, accumulation: GradientAccumulation) -> None:
        """Computes gradients, from the loss or from those that it receives."""
        if self.is_last:
            accumulation.add(self.score, self.samples, is_own=self.is_own)
        elif self.sent and self.coming:
            torch.autograd.backward(list(self.sent), self.coming.wait())
        self.score = None
        self.sent = ()
        self.coming = None

    def send(self, forward: bool = True) -> None:
        """Sends what the last pass has computed to the next or previous stage, if there is one."""
        if forward and not self.is_last:
            self.sent = self.stage.pass_on(self.value, self.chunk)
        elif not forward and self.received is not None:
            self.stage.send_gradients(self.received, self.chunk)
            self.received = None
        self.value = None


@dataclass(eq=False)
class PipelineForwardBackward:
    """Acts as the whole model on one of its stages; see ForwardBackward."""

    layers: StageModel
    """Calls the layers of a stage of this rank."""
    stage: Stage
    """Sends to and receives from other stages."""
    parts: StepParts
    shares: bool = False
    """Whether several stages of this rank share a parameter."""
    micro_batch: MicroBatch | None = None
    """That of the current forward pass of an update; None in an evaluation."""
    is_collective = True

    def __post_init__(self) -> None:
        self.model: Any = self
        self.has_same_samples = False
        """Whether ranks have compared the samples of their first update."""
        self.idle = [self.layers.of_others(chunk) for chunk in range(self.stage.chunks)]

    @property
    def training(self) -> bool:
        """Like ``training`` of a module: whether this is a forward pass of an update."""
        return self.micro_batch is not None

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """Called by a task's ``forward`` as the model; returns the outputs (in an update, only on the last stage)."""
        stage, under_way = self.stage, self.micro_batch
        value = only_value(inputs, more, again=under_way is not None and under_way.is_called)
        if under_way is not None:
            value = under_way.through(self.layers, value)
            if under_way.is_last:
                return value
            raise HandedOn
        for chunk in range(stage.chunks):
            one = MicroBatch(stage, chunk)
            one.begin()
            value = one.through(self.layers, value)
            one.send()
        if stage.rank == stage.last:
            for rank in range(stage.last):
                stage.send(value, rank, OUTPUT)
        else:
            value = stage.receive(stage.begin_receive(stage.last, OUTPUT, "tell the outputs")).value
        stage.settle()
        return value

    def run(self, accumulation: GradientAccumulation, micro_batches: Sequence[HostBatch], clock: StepClock) -> None:
        """See ForwardBackward. All stages get the same micro-batches and loss. Waits for stages are exchange time."""
        if not self.has_same_samples:
            self._require_same_samples(micro_batches)
            self.has_same_samples = True
        stage = self.stage
        batches, everyones = even_passes(micro_batches, self.parts.partition.sync_group)
        under_way = {
            (number, chunk): MicroBatch(stage, chunk, samples_of(host), is_own, number >= everyones)
            for number, (host, is_own) in enumerate(batches)
            for chunk in range(stage.chunks)
        }
        with self._own_streams():
            for act, each in acts(stage.rank, stage.group.size, len(batches), stage.chunks, stage.exchange.in_order):
                one = under_way[each.micro_batch, each.chunk]
                if act is Act.RECEIVE:
                    one.begin(each.forward)
                elif act is Act.SEND:
                    one.send(each.forward)
                    clock.mark(Phase.FORWARD if each.forward else Phase.BACKWARD)
                elif each.forward:
                    host, _ = batches[each.micro_batch]
                    batch = self.parts.compute.tensors(host if stage.chunks == 1 else copied(host))
                    clock.mark(Phase.TO_DEVICE)
                    with self._undone(one):
                        self._forward(batch, one, accumulation, host)
                else:
                    is_last = each.micro_batch == len(batches) - 1 and (each.chunk == 0 or not self.shares)
                    accumulation.reducer.begin_pass(is_last)
                    self.parts.partition.leave_out(self.idle[each.chunk])
                    with self._undone(one):
                        one.backward(accumulation)
        stage.settle()
        accumulation.take(stage.share_loss(accumulation.as_array()))

    def _require_same_samples(self, micro_batches: Sequence[HostBatch]) -> None:
        """Raises UserError, on all ranks, if ranks of one model got different samples. Collective.

        The first stage uses the inputs and the last one the targets, so a mismatch would go unnoticed.
        """
        world = self.parts.world
        found = world.everyone.allgather(list(map(checksum, micro_batches)), "compare the samples of stages")
        stage = len(found) // world.pipeline.size
        odd = next((rank for rank in range(stage, len(found)) if found[rank] != found[rank % stage]), None)
        if odd is not None:
            raise UserError(
                f"ranks {odd % stage} and {odd}, which are stages of one model, got different samples",
                "make transforms depend on the sample and its rng only, and streams on world.data",
            )

    @contextlib.contextmanager
    def _undone(self, under_way: MicroBatch) -> Iterator[None]:
        """A context for a pass, after which nothing is left of one over another rank's samples. Passes of this rank's
        own may follow it, and others may be under way, which need what they have saved of buffers.

        Undoing may read the model's state_dict, which frees gathered layers, so all ranks free theirs.
        """
        free = self.parts.partition.free if under_way.is_lent else lambda: None
        free()
        with contextlib.nullcontext() if under_way.is_own else self.parts.unchanged():
            yield
        free()

    def _forward(
        self, batch: dict[str, Tensor], under_way: MicroBatch, accumulation: GradientAccumulation, host: HostBatch
    ) -> None:
        task = self.parts.task
        with self._update(under_way), self.parts.compute.autocast():
            outputs = task.forward(self, batch)
            under_way.keep_loss(task.loss(outputs, batch))
            if under_way.is_own:
                accumulation.see(outputs, batch, host)
        if not under_way.is_called:
            raise UserError("forward does not call the model", ONCE)

    def dry_call(self, batch: dict[str, Tensor]) -> None:
        """A forward pass as in an update, on all stages, whose errors name the task's field."""
        for chunk in range(self.stage.chunks):
            own = {name: one.clone() for name, one in batch.items()}  # which a task may change in place
            under_way = MicroBatch(self.stage, chunk)
            under_way.begin()
            with self._update(under_way):
                try_loss(self.parts.task, self, own, self.parts.partition.hint)
            under_way.send()
        self.stage.settle()

    @contextlib.contextmanager
    def _update(self, under_way: MicroBatch) -> Iterator[None]:
        """A context for a forward pass of an update, which ends with the call of the model except on the last stage."""
        self.micro_batch = under_way
        try:
            with contextlib.suppress(HandedOn):
                yield
        finally:
            self.micro_batch = None
            self.parts.partition.leave()

    @contextlib.contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Uses different random numbers on each stage, derived from the common stream, without more state to save."""
        host = host_random_state()
        try:
            with own_stream(self.stage.rank, self.stage.device):
                seed_python(torch.initial_seed())
                yield
        finally:
            restore_host_random_state(host)


def only_value(inputs: Sequence[Any], more: Mapping[str, Any], again: bool) -> Any:
    """The input that ``forward`` calls its model with. Raises UserError unless it is one value, in one call."""
    if len(inputs) != 1 or more:
        given = "arguments by name" if more else f"{len(inputs)} arguments"
        raise UserError(f"forward calls the model with {given}", ONCE)
    if again:
        raise UserError("forward calls the model twice", ONCE)
    return inputs[0]


def checksum(batch: HostBatch) -> int:
    """Checksum of a batch's names, dtypes, shapes and values."""
    found = 0
    for name, array in sorted(batch.items()):
        found = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), found)
        found = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, found)
    return found


def captured(task: TorchTask, model: Module) -> str | None:
    """Name of a task's function that holds the model or a part of it (as a closure or attribute), if any."""
    parts = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}

    def is_end(value: Any) -> bool:
        return id(value) in parts or isinstance(value, (Tensor, np.ndarray))

    others = {"loss": task.loss, "forward": task.forward}
    others |= {f"metrics[{name!r}]": metric for name, metric in task.metrics.items()}
    for name, function in others.items():
        if any(id(value) in parts for _, value in reached(function, is_end, attributes)):
            return name
    return None


def pipeline_features(task: TorchTask, task_state: TaskState) -> dict[Feature, Any]:
    """Features of a task that matter to pipelines."""
    is_known = task.layers is not None or (isinstance(task.model, Module) and is_chain(task.model))
    of_ranks = [name for name, one in task.state.items() if isinstance(one, PerRank)]
    given = {
        Feature.EXTRA_STATE: next((type(module).__name__ for _, module in task_state.extra_state), None),
        Feature.CAPTURED_MODEL: captured(task, task_state.model),
        Feature.NO_LAYERS: not is_known,
        Feature.PER_RANK: next(iter(of_ranks), None),
    }
    return used(given)

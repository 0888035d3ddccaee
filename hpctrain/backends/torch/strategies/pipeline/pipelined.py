"""One stage of a task's model: its passes in an update, and outputs on all stages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.backends.torch.steps.update_step import Parts
from hpctrain.backends.torch.steps.updates import Passes
from hpctrain.backends.torch.strategies.pipeline.stage import ACTIVATION, OUTPUT, Received, Stage
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import one_forward_one_backward
from hpctrain.backends.torch.strategies.pipeline.stages import is_chain
from hpctrain.backends.torch.strategies.split_values import own_stream
from hpctrain.backends.torch.task.checks import try_loss
from hpctrain.backends.torch.task.task_state import TaskState, attributes
from hpctrain.config.features import Feature, used
from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.evaluation import even_batches
from hpctrain.train.framework import HostBatch, samples_of
from hpctrain.train.seeds import host_random_state, restore_host_random_state, seed_python
from hpctrain.train.stateful import PerRank
from hpctrain.train.walk_objects import reached

PASS_ON = "pass activations on"
"""Completes "waited for the other ranks to ..." in errors."""
ONCE = "let forward call the model once, on one value, such as a tuple: each layer gets what the one before returned"


class HandedOn(BaseException):
    """Ends a task's ``forward`` on all but the last stage. Not an Exception, so the task's code does not catch it."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on its way through this stage."""

    received: Received | None = None
    """What came from the previous stage."""
    sent: Sequence[Tensor] = ()
    """Tensors sent to the next stage that will get gradients."""
    score: Any = None
    """The loss, on the last stage."""
    samples: int = 0
    is_own: bool = True
    """False for another rank's batch; see Passes.add."""


@dataclass(eq=False)
class Pipelined:
    """Acts as the whole model on one of its stages; see PassRunner."""

    layers: Callable[[Any], Any]
    """Calls the layers of this stage."""
    stage: Stage
    """Sends to and receives from other stages."""
    parts: Parts
    calls: list[MicroBatch] | None = None
    """Calls in the current forward pass of an update; None in an evaluation."""
    meets = True

    def __post_init__(self) -> None:
        self.called: Any = self

    @property
    def training(self) -> bool:
        """Like ``training`` of a module: whether this is a forward pass of an update."""
        return self.calls is not None

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """Called by a task's ``forward`` as the model; returns the outputs (in an update, only on the last stage)."""
        stage, received = self.stage, None
        value = only_value(inputs, more, again=bool(self.calls))
        if not stage.is_first:
            received = stage.receive(stage.rank - 1, ACTIVATION, PASS_ON)
            value = received.value
        value = self.layers(value)
        sent = [] if stage.is_last else stage.send(value, stage.rank + 1, ACTIVATION)
        if self.calls is not None:
            self.calls.append(MicroBatch(received, sent))
            if stage.is_last:
                return value
            raise HandedOn
        if stage.is_last:
            for rank in range(stage.last):
                stage.send(value, rank, OUTPUT)
        else:
            value = stage.receive(stage.last, OUTPUT, "tell the outputs").value
        stage.settle()
        return value

    def begin(self, micro_batches: Sequence[HostBatch]) -> None:
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

    def run(self, passes: Passes, micro_batches: Sequence[HostBatch], clock: StepClock) -> None:
        """See PassRunner. All stages get the same micro-batches and loss; waiting for other stages is exchange time."""
        under_way: dict[int, MicroBatch] = {}
        batches = list(even_batches(micro_batches, self.parts.partition.sync_group))
        with self._own_streams(), contextlib.ExitStack() as of_others:
            order = one_forward_one_backward(self.stage.rank, self.stage.group.size, len(batches))
            for each, following in itertools.zip_longest(order, order[1:]):
                if each.forward:
                    host, is_own = batches[each.micro_batch]
                    batch = self.parts.compute.tensors(host)
                    clock.mark(Phase.TO_DEVICE)
                    if not is_own:  # such batches come last, so nothing of this rank's is undone
                        of_others.enter_context(self.parts.unchanged())
                    under_way[each.micro_batch] = self._forward(batch, samples_of(host), is_own)
                    clock.mark(Phase.FORWARD)
                else:
                    passes.reducer.begin_pass(is_last=each.micro_batch == len(batches) - 1)
                    goes_on = following is not None and following.forward
                    self._backward(under_way.pop(each.micro_batch), passes, goes_on)
                    clock.mark(Phase.BACKWARD)
        self.stage.settle()
        passes.take(self.stage.share_loss(passes.as_array()))

    def _forward(self, batch: dict[str, Tensor], samples: int, is_own: bool) -> MicroBatch:
        called: list[MicroBatch] = []
        score, task = None, self.parts.task
        with self._update(called), self.parts.compute.autocast(), contextlib.suppress(HandedOn):
            score = task.loss(task.forward(self, batch), batch)
        if not called:
            raise UserError("forward does not call the model", ONCE)
        return dataclasses.replace(called[0], score=score, samples=samples, is_own=is_own)

    def _backward(self, micro_batch: MicroBatch, passes: Passes, goes_on: bool) -> None:
        """Runs one backward pass; ``goes_on`` says whether the next pass is a forward pass."""
        if self.stage.is_last:
            passes.add(micro_batch.score, micro_batch.samples, is_own=micro_batch.is_own)
        elif micro_batch.sent:
            torch.autograd.backward(list(micro_batch.sent), self.stage.receive_gradients(micro_batch.sent))
        if micro_batch.received is not None:
            if goes_on:
                self.stage.receive_early(self.stage.rank - 1, ACTIVATION, PASS_ON)
            self.stage.send_gradients(micro_batch.received)

    def dry_call(self, batch: dict[str, Tensor]) -> None:
        """A forward pass as in an update, on all stages, whose errors name the task's field."""
        with self._update([]), contextlib.suppress(HandedOn):
            try_loss(self.parts.task, self, batch, self.parts.partition.hint)
        self.stage.settle()

    @contextlib.contextmanager
    def _update(self, called: list[MicroBatch]) -> Iterator[None]:
        """A context for a forward pass of an update."""
        self.calls = called
        try:
            yield
        finally:
            self.calls = None
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
    return next(
        (name for name, one in others.items() if any(id(at) in parts for _, at in reached(one, is_end, attributes))),
        None,
    )


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

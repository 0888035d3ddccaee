"""The framework of a PyTorch task: a step program, an evaluator and the state of the model on this rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from hpctrain.backends.named_state import named_outputs
from hpctrain.backends.torch.flat_weights import TorchFlatWeights
from hpctrain.backends.torch.process_groups import peers_of, settings_of
from hpctrain.backends.torch.reduce.allreduce import HOST_S_PER_BYTE
from hpctrain.backends.torch.reduce.gradients import as_real
from hpctrain.backends.torch.state.torch_state import Averages, TorchState
from hpctrain.backends.torch.steps.batch_metrics import BatchMetrics
from hpctrain.backends.torch.steps.own_step import OwnSteps
from hpctrain.backends.torch.steps.update_step import ForwardBackward, StepParts, UpdateStep
from hpctrain.backends.torch.strategies.strategy import PreparedModel
from hpctrain.backends.torch.task.checks import TORCH, judges, try_metrics
from hpctrain.backends.update import UpdateResult
from hpctrain.comm.group import Group
from hpctrain.errors import UserError, kind_of
from hpctrain.tasks.mean_check import require_mean
from hpctrain.train.evaluation import try_meters
from hpctrain.train.flops import Flops
from hpctrain.train.framework import Facts, FrameworkOfParts, HostBatch, Sums, copied
from hpctrain.train.metrics import Meter


class TorchFramework(FrameworkOfParts):
    """Trains, evaluates and predicts with a TorchTask; see train.framework.Framework and ``open_torch``.

    Args:
        parts: objects shared by its programs.
        program: makes updates.
        evaluator: evaluates and predicts.
        source: the model's state.
        prepared: the model as prepared by strategies.
        advice: see Facts.
    """

    evaluator: TorchEvaluator
    source: TorchState

    def __init__(
        self,
        parts: StepParts,
        program: UpdateStep | OwnSteps,
        evaluator: TorchEvaluator,
        source: TorchState,
        prepared: PreparedModel,
        advice: Sequence[str],
    ) -> None:
        self.advice = advice
        self.parts = parts
        self.program = program
        self.evaluator = evaluator
        self.source = source
        self.prepared = prepared
        self.world = parts.world
        self.host = parts.compute
        self.device = parts.compute.device
        self.task = parts.task
        self.model = parts.model
        self.optimizer = parts.task.optimizer
        self.flops: Flops | None = None
        self.step = program.run
        self.use = parts.reducers.use
        self.set_learning_rate = source.optimizer_state.set_rates

    @property
    def facts(self) -> Facts:
        reducers = self.parts.reducers
        source = self.source
        gradient_bytes = self._gradient_bytes
        reducer = reducers.used.name if reducers.used else None
        on_host = self.device.type != "cpu" and reducer is not None and reducer.startswith("mpi")
        return Facts(
            name="torch",
            leaves=source.task_state.leaves,
            gradient_bytes=gradient_bytes,
            reducer_name=reducer,
            learning_rate=source.optimizer_state.learning_rate,
            through_host_s=gradient_bytes * HOST_S_PER_BYTE if on_host else 0.0,
            flops=self.flops,
            num_layers=self.prepared.num_layers,
            other_names=source.other_names,
            meta_init=source.meta_init,
            undeclared=tuple(source.task_state.undeclared),
            advice=self.advice,
            nccl=settings_of(self.device),
            meters=self.parts.metrics.meters if self.parts.metrics else {},
        )

    @functools.cached_property
    def _gradient_bytes(self) -> int:
        updates = self.prepared.updates
        assert updates is not None, "the last strategy has made some"
        tables = {id(one) for reducers in updates.reducers.values() for one in reducers.sparse}
        return sum(4 * as_real(one).numel() for one in self.source.averages.parameters if id(one) not in tables)

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = (), pair: HostBatch | None = None) -> None:
        parts = self.parts
        with parts.unchanged(), parts.compute.autocast(), parts.batch_norms.trial(), self.prepared.uncompiled():
            parts.modes.train()
            self.flops = self.program.dry_call(batch)
            self.evaluator.try_on(validation or [batch])
            if pair is not None and self.task.loss is not None and not self.evaluator.forward_backward.is_collective:
                self.evaluator.try_mean(pair)
            self.source.require_same_layout()

    @property
    def keras_model(self) -> Any:
        """See checkpoint.initial.OfKeras."""
        return getattr(self.task.model, "keras_model", None)

    def begin_averages(self) -> None:
        """See checkpoint.initial.OfKeras."""
        self.source.averages.begin()

    def flat_weights(self, group: Group, by_device: Group | None) -> TorchFlatWeights:
        """See backends.local_training.Apart."""
        peers = None if by_device is None else peers_of(by_device, self.device)
        return TorchFlatWeights(group, peers, self.source.averages.parameters)

    def close(self) -> None:
        self.parts.reducers.close()
        self.parts.partition.tp_group.exchange.close()
        self.prepared.close()
        self.program.close()
        self.parts.batch_norms.close()


@dataclass(eq=False)
class TorchEvaluator:
    """See train.framework.Evaluator."""

    parts: StepParts
    """Objects shared with the framework."""
    forward_backward: ForwardBackward
    """Runs the model."""
    averages: Averages
    """EMA weights that replace the parameters, if there are any."""
    meters: Mapping[str, Meter]
    """The task's metrics that are not functions."""

    @property
    def sync_group(self) -> Group | None:
        return self.parts.partition.sync_group

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        task, compute = self.parts.task, self.parts.compute
        with self._evaluating():
            inputs = compute.tensors(batch)
            with compute.autocast():
                outputs = task.forward(self.forward_backward.model, inputs)
            metrics = BatchMetrics(compute, judges(task), dict(enumerate(meters)))
            return UpdateResult(metrics.scores(outputs, inputs, batch)).sums()

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        task, compute = self.parts.task, self.parts.compute
        with self._evaluating(), compute.autocast():
            outputs = task.forward(self.forward_backward.model, compute.tensors(batch))
        return {name: on_host(value, name) for name, value in named_outputs(outputs).items()}

    def try_on(self, batches: Sequence[HostBatch]) -> None:
        """Raises UserError if the loss or a metric fails on one of these batches; skipped without validation and
        ``train.metrics``."""
        task, compute = self.parts.task, self.parts.compute
        for batch in batches if task.validation is not None or self.parts.metrics is not None else ():
            with self._evaluating():
                try_metrics(task, self.forward_backward.model, compute.tensors(copied(batch)))
            try_meters(self, copied(batch))

    def try_mean(self, batch: HostBatch) -> None:
        """Raises UserError if the loss of these samples is not a mean; calls the model, see ``require_mean``."""
        task = self.parts.task
        inputs = self.parts.compute.tensors(copied(batch))
        again = functools.partial(task.forward, self.forward_backward.model)
        with self._evaluating():
            require_mean(TORCH, "loss", task.loss, None, inputs, again)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context without gradients, in evaluation mode, with the averaged weights if there are any."""
        self.parts.modes.evaluate()
        self.averages.swap()
        try:
            with torch.no_grad():
                yield
        finally:
            self.averages.swap()


def on_host(output: Any, name: str = "output") -> NDArray[Any]:
    """Converts a tensor to NumPy; bfloat16 becomes float32. Raises UserError if it is none."""
    if not isinstance(output, torch.Tensor) or output.layout is not torch.strided:
        kind = f"a tensor of layout {output.layout}" if isinstance(output, torch.Tensor) else kind_of(output)
        raise UserError(
            f"{name} of the model's outputs is {kind}, not an array",
            "let forward return a dense tensor, or a dict, tuple or list of them, while model.training is False",
        )
    return (output.float() if output.dtype == torch.bfloat16 else output).numpy(force=True)

"""The framework of a Keras task: a step program, an evaluator and the state of the model on this rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.backends.local_training import ALL, covered
from hpctrain.backends.named_state import named_outputs
from hpctrain.backends.tensorflow.state.keras_state import KerasState
from hpctrain.backends.tensorflow.steps.loss_step import LossProgram
from hpctrain.backends.tensorflow.steps.passes import KerasPasses, TensorFlowMemory, on_device
from hpctrain.backends.tensorflow.task.dry_call import try_evaluation, try_mean
from hpctrain.backends.update import UpdateResult
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.tasks.meters import Entry
from hpctrain.train.evaluation import try_meters
from hpctrain.train.flops import Flops
from hpctrain.train.framework import Facts, FrameworkOfParts, HostBatch, Sums, copied
from hpctrain.train.metrics import Arrays, Meter, Seen


class KerasStepProgram(Protocol):
    """Makes updates."""

    @property
    def reducer_name(self) -> str | None:
        """See train.framework.Facts."""

    @property
    def gradient_bytes(self) -> int:
        """See train.framework.Facts."""

    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        """Makes one update; see train.framework.Step."""

    def dry_call(self, batch: HostBatch) -> Flops | None:
        """Tries passes on a batch. Returns the operations of training on a sample, if known. Raises UserError."""

    def close(self) -> None:
        """Closes reducers."""


class KerasFramework(FrameworkOfParts):
    """Trains, evaluates and predicts with a KerasTask; see train.framework.Framework and ``open_keras``.

    Args:
        task: the opened task.
        program: makes updates.
        evaluator: evaluates and predicts.
        source: the model's state.
    """

    evaluator: KerasEvaluator
    source: KerasState
    host = TensorFlowMemory()

    def __init__(
        self, task: KerasTask, program: KerasStepProgram, evaluator: KerasEvaluator, source: KerasState
    ) -> None:
        self.task, self.program, self.evaluator, self.source = task, program, evaluator, source
        self.step, self.set_learning_rate = program.run, source.rates.multiply
        self.flops: Flops | None = None

    @property
    def group(self) -> Group:
        """The ranks that see different samples."""
        return self.source.group

    @property
    def facts(self) -> Facts:
        program, rate = self.program, self.source.rates.current
        reducer = program.reducer_name
        return Facts("tensorflow", self.source.leaves, program.gradient_bytes, reducer, self.flops, learning_rate=rate)

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = (), pair: HostBatch | None = None) -> None:
        with self.source.unchanged():
            self.flops = self.program.dry_call(batch)
            self.evaluator.try_on(validation or [batch])
            if pair is not None and self.task.loss is not None:
                try_mean(self.task, self.evaluator.passes, on_device(copied(pair)))

    def weights(self, at: slice = ALL) -> NDArray[Any]:
        """See backends.local_training.Apart."""
        trained = self.task.model.trainable_variables
        parts = covered([math.prod(one.shape) for one in trained], at)
        return np.concatenate([np.asarray(trained[index].value).reshape(-1)[part] for index, part, _ in parts])

    def set_weights(self, flat: NDArray[Any], at: slice = ALL) -> None:
        """See backends.local_training.Apart."""
        trained = self.task.model.trainable_variables
        for index, part, place in covered([math.prod(one.shape) for one in trained], at):
            values = np.array(trained[index].numpy())
            values.reshape(-1)[part] = flat[place]
            trained[index].assign(values)

    def use(self, choice: ReducerChoice) -> None:
        """See backends.local_training.Apart."""
        assert isinstance(self.program, LossProgram), "others are refused"
        self.program.chosen.use(choice)

    def close(self) -> None:
        self.program.close()
        self.evaluator.passes.packing.close()
        self.source.batch_norms.close()


class KerasEvaluator:
    """See train.framework.Evaluator.

    Args:
        task: the task, for its loss and metrics.
        passes: passes of its model.
        meters: the task's metrics that are not functions.
        is_tried: whether the step's dry call also tries evaluations, as for a custom ``test_step``.
    """

    sync_group = None

    def __init__(
        self, task: KerasTask, passes: KerasPasses, meters: Mapping[str, Meter], is_tried: bool = False
    ) -> None:
        self.task, self.passes, self.meters = task, passes, meters
        self.tries = task.validation is not None and not is_tried

    def try_on(self, batches: Sequence[HostBatch]) -> None:
        """Raises UserError if the loss or a metric fails on one of these batches; skipped without validation."""
        for batch in batches if self.tries else ():
            try_evaluation(self.task, self.passes, on_device(copied(batch)))
            try_meters(self, copied(batch))

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        """See Evaluator; uses the averaged weights if an EMA is kept."""
        inputs = on_device(batch)
        found, outputs = self.passes.evaluate(inputs)
        seen = Seen(outputs, inputs, batch, to_host)
        for meter in meters:
            meter.update(seen)
        return {name: (float(total), float(weight)) for name, (total, weight) in found.items()}

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        """See Evaluator; the outputs in a list are named ``output_0``, ``output_1``, and so on."""
        try:
            return {name: np.asarray(one) for name, one in named_outputs(self.passes.predict(on_device(batch))).items()}
        except NotImplementedError as error:
            if type(self.task.model).call is not keras.Model.call:
                raise  # raised by the user's code, with its own message
            what = f"the model {type(self.task.model).__name__} has no call method, and the task has no forward"
            raise UserError(what, "define call(self, inputs), or give the task forward=") from error


class KerasMeter:
    """See train.metrics.Meter. Variables are summed over ranks, as is correct for all built-in Keras metrics.

    Additivity is checked on the first batch: the same batch twice must double the variables.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.metric: keras.metrics.Metric = entry.metric
        self.adds_up = False

    def reset(self) -> None:
        self.metric.reset_state()

    def update(self, seen: Seen) -> None:
        with self.entry.named(seen.batch):
            predictions, targets, *weights = self.entry.arguments(seen.outputs, seen.batch)
            self.metric.update_state(targets, predictions, *weights)
            if not self.adds_up:
                once = self._values()
                self.metric.update_state(targets, predictions, *weights)
                self._require_doubled(once, self._values())
                self._assign(once)
                self.adds_up = True

    def state(self) -> Arrays:
        """The metric's variables; some may be missing before its first batch."""
        return {str(number): value for number, value in enumerate(self._values())}

    def merge(self, first: Arrays, second: Arrays) -> Arrays:
        return {**first, **second, **{name: first[name] + second[name] for name in first if name in second}}

    def compute(self, state: Arrays) -> Any:
        with self.entry.named():
            self._assign([state[str(number)] for number in range(len(state))])
            return to_host(self.metric.result())

    def _values(self) -> list[Any]:
        return [np.array(variable.numpy()) for variable in self.metric.variables]

    def _assign(self, values: list[Any]) -> None:
        for variable, value in zip(self.metric.variables, values, strict=True):
            variable.assign(value)

    def _require_doubled(self, once: list[Any], twice: list[Any]) -> None:
        for variable, one, two in zip(self.metric.variables, once, twice, strict=True):
            if not np.allclose(2 * one, two, rtol=1e-4, equal_nan=True):
                raise UserError(
                    f"{self.entry.field} of the task, {type(self.metric).__name__}, keeps {variable.name!r}, which is "
                    "not a sum over samples: those of several ranks do not add up",
                    "write it as an hpctrain.Metric, whose merge combines the states of two ranks",
                )


def to_host(value: Any) -> Any:
    """Converts the tensors of a nested structure to NumPy arrays."""
    return tf.nest.map_structure(lambda one: one.numpy() if isinstance(one, tf.Tensor) else one, value)

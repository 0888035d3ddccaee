"""The framework of a Keras task: a step program, an evaluator and the state of the model on this rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hpctrain.backends.keras.keras_meter import to_host
from hpctrain.backends.local_training import ALL, HostFlatWeights, covered
from hpctrain.backends.named_state import named_outputs
from hpctrain.backends.tensorflow.state.keras_state import KerasState
from hpctrain.backends.tensorflow.steps.keras_own_step import TrainStepProgram
from hpctrain.backends.tensorflow.steps.loss_step import LossProgram
from hpctrain.backends.tensorflow.steps.passes import KerasPasses, on_device
from hpctrain.backends.tensorflow.task.dry_call import try_evaluation, try_mean
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.evaluation import try_meters
from hpctrain.train.flops import Flops
from hpctrain.train.framework import Facts, FrameworkOfParts, HostBatch, HostMemory, Sums, copied
from hpctrain.train.metrics import Meter, Seen


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
    host = HostMemory()

    def __init__(
        self, task: KerasTask, program: LossProgram | TrainStepProgram, evaluator: KerasEvaluator, source: KerasState
    ) -> None:
        self.task = task
        self.program = program
        self.evaluator = evaluator
        self.source = source
        self.step = program.run
        self.set_learning_rate = source.rates.multiply
        self.flops: Flops | None = None

    @property
    def keras_model(self) -> keras.Model:
        """See checkpoint.initial.OfKeras."""
        return self.task.model

    @property
    def group(self) -> Group:
        """The ranks that see different samples."""
        return self.source.group

    @property
    def facts(self) -> Facts:
        program, rate = self.program, self.source.rates.current
        reducer = program.reducer_name
        return Facts(
            name="tensorflow",
            leaves=self.source.leaves,
            gradient_bytes=program.gradient_bytes,
            reducer_name=reducer,
            flops=self.flops,
            learning_rate=rate,
            meters=program.meters,
        )

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = (), pair: HostBatch | None = None) -> None:
        with self.source.unchanged():
            self.flops = self.program.dry_call(batch)
            self.evaluator.try_on(validation or [batch])
            if pair is not None and self.task.loss is not None:
                try_mean(self.task, self.evaluator.passes, on_device(copied(pair)))

    def begin_averages(self) -> None:
        """See checkpoint.initial.OfKeras."""
        self.source.begin_averages()

    def flat_weights(self, group: Group, by_device: Group | None) -> HostFlatWeights:
        """See backends.local_training.Apart."""
        assert by_device is None, "refused"
        return HostFlatWeights(group, self.weights, self.set_weights)

    def weights(self, at: slice = ALL) -> NDArray[Any]:
        """See backends.local_training.FlatWeights."""
        trained = self.task.model.trainable_variables
        parts = covered([math.prod(one.shape) for one in trained], at)
        return np.concatenate([np.asarray(trained[index].value).reshape(-1)[part] for index, part, _ in parts])

    def set_weights(self, flat: NDArray[Any], at: slice = ALL) -> None:
        """See backends.local_training.FlatWeights."""
        trained = self.task.model.trainable_variables
        for index, part, place in covered([math.prod(one.shape) for one in trained], at):
            values = np.array(trained[index].numpy())
            values.reshape(-1)[part] = flat[place]
            trained[index].assign(values)

    def use(self, choice: ReducerChoice) -> None:
        """See backends.local_training.Apart."""
        assert isinstance(self.program, LossProgram), "others are refused"
        self.program.reducers.use(choice)

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
        self.tries = (task.validation is not None or bool(passes.reports)) and not is_tried

    def try_on(self, batches: Sequence[HostBatch]) -> None:
        """Raises UserError if the loss or a metric fails on one of these batches; skipped without validation and
        ``train.metrics``."""
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

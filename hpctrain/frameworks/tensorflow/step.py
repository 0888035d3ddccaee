"""An update of a Keras model as one TensorFlow function: forward, backward, exchange and optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.frameworks.tensorflow.passes import Passes, Tensors, Traced, Update
from hpctrain.frameworks.update import NotFinite, UpdateRule
from hpctrain.reduce.exchange_slots import LOSS, SLOTS, SQUARE, WEIGHT, read_slots
from hpctrain.reduce.tensorflow_reducer import Reducer
from hpctrain.train.clock import Phase, StepClock


class Judge:
    """What an update does on the host while TensorFlow runs it: it marks the clock, and decides by the sums."""

    def __init__(self, clock: StepClock, rule: UpdateRule) -> None:
        self.clock = clock
        self.rule = rule
        self.own = (0.0, 0.0)
        """Sum and weight of this rank's loss, divided by the samples of the global batch."""
        self.norm: float | None = None
        """L2 norm of the averaged gradient before clipping; None if the update was left out."""
        self.stopped = False
        """Whether the update was ended by NotFinite."""

    def arrive(self, slots: NDArray[Any]) -> NDArray[Any]:
        """This rank's gradients are complete, and these are its slots."""
        self.own, self.stopped = (float(slots[LOSS]), float(slots[WEIGHT])), False
        self.clock.mark(Phase.BACKWARD)
        return slots

    def decide(self, slots: NDArray[Any]) -> np.float64:
        """What the summed gradients are to be multiplied by, from the summed slots; NaN: the update is left out.

        Raises:
            NotFinite: loss or gradient is not finite, and it is not the loss scale that is at fault.
        """
        self.clock.mark(Phase.EXCHANGE)
        square = float(slots[SQUARE])
        try:
            decision = self.rule.decide(read_slots(slots.tolist()), math.sqrt(square) if square >= 0 else math.nan)
        except NotFinite:
            self.stopped = True
            raise
        self.norm = decision.norm
        return np.float64(math.nan if decision.factor is None else decision.factor)


class Step:
    """Updates with one reducer. TensorFlow calls Python where ranks meet and where the sums are judged, else never."""

    def __init__(self, passes: Passes, update: Update, reducer: Reducer, judge: Judge) -> None:
        self.passes, self.update, self.reducer, self.judge = passes, update, reducer, judge
        self.whole = Traced(self._whole, compiled=False, autograph=False)
        """whole(batch, share, loss_scale): all of an update from one batch; arguments as those of Passes.gradients."""
        self.travelling = passes.travelling
        self.complete = tf.function(self._complete, autograph=False, input_signature=[self.travelling.specs()])
        """complete(gradients): the rest of an update, from this rank's gradients."""

    def _whole(self, batch: Tensors, share: tf.Tensor, loss_scale: tf.Tensor) -> None:
        self._complete(self.passes.gradients(batch, share, loss_scale))

    def _complete(self, tensors: Sequence[tf.Tensor]) -> None:
        rows, (*gradients, slots) = self.travelling.apart(tensors)
        with tf.control_dependencies([*gradients, *rows]):
            slots = like(slots, tf.numpy_function(self.judge.arrive, [slots], slots.dtype))
        with tf.control_dependencies([slots]):
            *sums, slots = self.reducer.borrow([*gradients, slots])
        if rows:
            with tf.control_dependencies([*sums, slots]):  # all ranks exchange in this order
                rows = self.travelling.tables.sum([tf.identity(tensor) for tensor in rows])
            square = tf.cast(self.travelling.tables.square(rows), slots.dtype)
            slots += square * tf.one_hot(SQUARE, SLOTS, dtype=slots.dtype)
        with tf.control_dependencies([*sums, *rows]):
            factor = like(tf.zeros(()), tf.numpy_function(self.judge.decide, [slots], tf.float64))
        with tf.control_dependencies([factor]):
            if self.judge.rule.loss_scale is None:
                done = self._update(rows, sums, factor)
            else:
                finite = tf.math.is_finite(factor)
                done = tf.cond(finite, lambda: self._update(rows, sums, factor), lambda: tf.constant(True))
        if self.reducer.lends:
            with tf.control_dependencies([done]):
                tf.raw_ops.Assert(condition=done, data=sums)  # holds them until the update is done

    def _update(self, rows: Sequence[tf.Tensor], sums: Sequence[tf.Tensor], factor: tf.Tensor) -> tf.Tensor:
        if self.judge.rule.needs_norm or self.passes.weighted is not False:
            sums = [total * tf.cast(factor, total.dtype) for total in sums]
            rows = self.travelling.tables.scaled(rows, factor)
        elif self.reducer.lends and not makes_new_tensors(self.update.optimizer):
            sums = [tf.raw_ops.DeepCopy(x=total) for total in sums]
        return self.update.run(rows, sums)


def like(tensor: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """What Python returned, which has the shape of another tensor."""
    value.set_shape(tensor.shape)
    return value


def makes_new_tensors(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it computes with gradients only, as Keras' own do: a variable that is assigned one shares its memory."""
    return type(optimizer).__module__.partition(".")[0] == "keras"

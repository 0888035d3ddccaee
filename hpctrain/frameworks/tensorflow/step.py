"""An update of a Keras model as one TensorFlow function: forward, backward, exchange and optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.frameworks.loss_scale import LossScale
from hpctrain.frameworks.tensorflow.passes import Passes, Tensors, Traced, Update
from hpctrain.reduce.exchange_slots import LOSS, SQUARE, WEIGHT, read_slots
from hpctrain.reduce.tensorflow_reducer import Reducer
from hpctrain.train.clock import Phase, StepClock


class NotFinite(Exception):
    """Ends an update before it reaches the weights."""


class Judge:
    """What an update does on the host while TensorFlow runs it: it tells the clock, and decides by the sums."""

    def __init__(self, clock: StepClock, clip_norm: float | None, loss_scale: LossScale | None) -> None:
        self.clock = clock
        self.clip_norm = clip_norm
        self.loss_scale = loss_scale
        self.scales = clip_norm is not None or loss_scale is not None
        """Whether it may ask for another factor than 1 where the loss has no weight."""
        self.own = (0.0, 0.0)
        """Sum and weight of this rank's loss, divided by the samples of the global batch."""
        self.norm = 0.0
        """L2 norm of the averaged gradient before clipping."""
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
        known = read_slots(slots.tolist())
        divisor = known.divisor * (self.loss_scale.factor if self.loss_scale else 1.0)
        square = float(slots[SQUARE])
        self.norm = math.sqrt(square) / divisor if square >= 0 else math.nan
        if math.isfinite(known.loss) and math.isfinite(self.norm):
            if self.loss_scale:
                self.loss_scale.succeeded()
            return np.float64(clip_factor(self.norm, self.clip_norm) / divisor)
        if self.loss_scale and self.loss_scale.overflowed():
            return np.float64(math.nan)
        self.stopped = True
        raise NotFinite


class Step:
    """Updates with one reducer. TensorFlow calls Python where ranks meet and where the sums are judged, else never."""

    def __init__(self, passes: Passes, update: Update, reducer: Reducer, judge: Judge) -> None:
        self.passes, self.update, self.reducer, self.judge = passes, update, reducer, judge
        self.whole = Traced(self._whole, compiled=False, autograph=False)
        """whole(batch, share, loss_scale): all of an update from one batch; arguments as those of Passes.gradients."""
        self.complete = tf.function(self._complete, autograph=False)
        """complete(pieces): the rest of an update, from this rank's gradients."""

    def _whole(self, batch: Tensors, share: tf.Tensor, loss_scale: tf.Tensor) -> None:
        self._complete(self.passes.gradients(batch, share, loss_scale))

    def _complete(self, pieces: Sequence[tf.Tensor]) -> None:
        *gradients, slots = pieces
        with tf.control_dependencies(gradients):
            slots = like(slots, tf.numpy_function(self.judge.arrive, [slots], slots.dtype))
        with tf.control_dependencies([slots]):
            *sums, slots = self.reducer.borrow([*gradients, slots])
        with tf.control_dependencies(sums):
            factor = like(tf.zeros(()), tf.numpy_function(self.judge.decide, [slots], tf.float64))
        with tf.control_dependencies([factor]):
            if self.judge.loss_scale is None:
                done = self._update(sums, factor)
            else:
                finite = tf.math.is_finite(factor)
                done = tf.cond(finite, lambda: self._update(sums, factor), lambda: tf.constant(True))
        if self.reducer.lends:
            with tf.control_dependencies([done]):
                tf.raw_ops.Assert(condition=done, data=sums)  # holds them until the update is done

    def _update(self, sums: Sequence[tf.Tensor], factor: tf.Tensor) -> tf.Tensor:
        if self.judge.scales or self.passes.weighted is not False:
            sums = [total * tf.cast(factor, total.dtype) for total in sums]
        elif self.reducer.lends and not makes_new_tensors(self.update.optimizer):
            sums = [tf.raw_ops.DeepCopy(x=total) for total in sums]
        return self.update.run(sums)


def like(tensor: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """What Python returned, which has the shape of another tensor."""
    value.set_shape(tensor.shape)
    return value


def makes_new_tensors(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it computes with gradients only, as Keras' own do: a variable that is assigned one shares its memory."""
    return type(optimizer).__module__.partition(".")[0] == "keras"


def clip_factor(norm: float, limit: float | None) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is at most the limit."""
    return limit / norm if limit is not None and norm > limit else 1.0

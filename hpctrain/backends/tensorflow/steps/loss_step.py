"""The step program of a task with a loss: one TensorFlow function for forward, backward, exchange and optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.backends.joint_statistics import BatchNorms
from hpctrain.backends.keras.keras_meter import to_host
from hpctrain.backends.tensorflow.keras_performance import training_flops
from hpctrain.backends.tensorflow.keras_reducer import KerasReducer, own_errors
from hpctrain.backends.tensorflow.steps.passes import (
    BatchFunction,
    KerasOptimizerStep,
    KerasPasses,
    KerasStepContext,
    Scores,
    Tensors,
    on_device,
)
from hpctrain.backends.tensorflow.task.dry_call import try_training
from hpctrain.backends.update import LOSS_OR_GRADIENT, NotFinite, UpdateResult, UpdateRule, decided, ranks_at_fault
from hpctrain.reduce.flat_layout import SLOTS, SQUARE, WEIGHT, read_slots
from hpctrain.reduce.reducer_choice import ChosenReducer
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.evaluation import add
from hpctrain.train.flops import Flops
from hpctrain.train.framework import HostBatch, copied
from hpctrain.train.metrics import Meter, Seen

READ = 4
"""Number of slots read after an update: LOSS to SQUARE."""


class UpdateJudge:
    """The host's side of an update: marks the clock at the exchange and evaluates the outcome."""

    def __init__(self, clock: StepClock, rule: UpdateRule) -> None:
        self.clock = clock
        self.rule = rule
        self.own = (0.0, 0.0)
        """Sum and weight of this rank's loss, divided by the samples of the global batch."""
        self.norm: float | None = None
        """L2 norm of the averaged gradient before clipping; None if the update was skipped."""
        self.finite = tf.Variable(True, trainable=False)
        """Whether loss and gradient of the last update were finite; assigned by the update."""
        self.arrive = lambda: clock.mark(Phase.BACKWARD)
        """Called when this rank's gradients are complete."""

    def read(self, values: tf.Tensor, ended: Phase) -> None:
        """Reads the result of an update; see UpdateFunctions.

        Args:
            values: the result.
            ended: the phase whose end it holds.

        Raises:
            NotFinite: loss or gradient is not finite, and the loss scale is not the cause.
        """
        loss, weight, *slots, end = values.numpy().tolist()
        self.own = loss, weight
        self.clock.mark_past(ended, time.time() - end)
        square = slots[SQUARE]
        self.norm = self.rule.decide(read_slots(slots), math.sqrt(square) if square >= 0 else math.nan).norm


class UpdateFunctions:
    """Makes updates with one reducer. TensorFlow calls Python only when an exchange begins.

    An update that is not finite ends in a TensorFlow error and leaves ``UpdateJudge.finite`` False; with a loss scale
    it is skipped.

    Both functions return the float64 vector that ``UpdateJudge.read`` reads: LOSS and WEIGHT of this rank, the first
    READ slots of the sums, and the wall-clock time at which the phase ``timed`` ended.
    """

    def __init__(
        self, passes: KerasPasses, optimizer_step: KerasOptimizerStep, reducer: KerasReducer, judge: UpdateJudge
    ) -> None:
        self.passes = passes
        self.optimizer_step = optimizer_step
        self.reducer = reducer
        self.judge = judge
        self.timed = Phase.EXCHANGE if reducer.has_peers else Phase.BACKWARD
        self.whole = BatchFunction(self._whole, compiled=False)
        """whole(batch, share, loss_scale): an update from one batch; arguments, and what else it returns, as for
        ``KerasPasses.gradients``."""
        self.packing = passes.packing
        signature = [self.packing.specs(), tf.TensorSpec((), tf.float64)]
        self.complete = tf.function(self._complete, autograph=False, input_signature=signature)
        """complete(gradients, loss_scale): an update from this rank's gradients."""

    def _whole(self, batch: Tensors, share: tf.Tensor, loss_scale: tf.Tensor) -> tuple[tf.Tensor, tuple[Scores, Any]]:
        gradients, seen = self.passes.gradients(batch, share, loss_scale)
        return self._complete(gradients, loss_scale), seen

    def _complete(self, tensors: Sequence[tf.Tensor], loss_scale: tf.Tensor) -> tf.Tensor:
        rows, (*gradients, own) = self.packing.apart(tensors)
        judge, has_peers = self.judge, self.reducer.has_peers
        first = rows if has_peers else [time_after([*gradients, *rows, tf.identity(own)])]
        with tf.control_dependencies(first):
            *sums, slots = self.reducer.borrow([*gradients, own], judge.arrive if has_peers else None)
        if rows:
            with tf.control_dependencies([*sums, slots]):  # all ranks exchange in this order
                rows = self.packing.tables.sum([tf.identity(tensor) for tensor in rows])
            square = tf.cast(self.packing.tables.square(rows), slots.dtype)
            slots += square * tf.one_hot(SQUARE, SLOTS, dtype=slots.dtype)
        end = time_after([*sums, *rows, slots]) if has_peers else first[0]
        if not judge.rule.needs_norm and self.passes.weighted is False:
            finite, factor = tf.reduce_all(tf.math.is_finite(slots)), None
        else:
            exact = tf.cast(slots, tf.float64)
            clip_norm = judge.rule.clip_norm
            norm = tf.sqrt(exact[SQUARE])
            factor, finite = decided(exact, norm, loss_scale, clip_norm, tf.where, tf.math.is_finite)
        with tf.control_dependencies([*sums, *rows]):
            if judge.rule.loss_scale is None:
                with tf.control_dependencies([judge.finite.assign(finite, read_value=False)]):
                    # Unlike tf.cond, it costs next to nothing.
                    goes_on = tf.raw_ops.Assert(condition=finite, data=[finite])
                with tf.control_dependencies([goes_on]):
                    done = self._update(rows, sums, factor)
            else:
                done = tf.cond(finite, lambda: self._update(rows, sums, factor), lambda: tf.constant(True))
        if self.reducer.lends:
            with tf.control_dependencies([done]):
                tf.raw_ops.Assert(condition=done, data=[*sums, slots])  # holds them until the update is done
        values = tf.cast(tf.concat([own[: WEIGHT + 1], slots[:READ]], 0), tf.float64)
        return tf.concat([values, [end]], 0)

    def _update(self, rows: Sequence[tf.Tensor], sums: Sequence[tf.Tensor], factor: tf.Tensor | None) -> tf.Tensor:
        if factor is not None:
            sums = [total * tf.cast(factor, total.dtype) for total in sums]
            rows = self.packing.tables.scaled(rows, factor)
        elif self.reducer.lends and not makes_new_tensors(self.optimizer_step.optimizer):
            sums = [tf.raw_ops.DeepCopy(x=total) for total in sums]
        return self.optimizer_step.run(rows, sums)


def time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Seconds since 1970 at which the tensors are complete, read without calling Python."""
    with tf.device("CPU"), tf.control_dependencies(tensors):
        return tf.timestamp()


def makes_new_tensors(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it never assigns a gradient itself to a variable, which would share its memory; true of Keras' own."""
    return type(optimizer).__module__.partition(".")[0] == "keras"


@dataclass(eq=False)
class LossProgram:
    """If the reducer must be measured, the first update's batch is used for that."""

    context: KerasStepContext
    passes: KerasPasses
    reducers: ChosenReducer[KerasReducer]
    optimizer_step: KerasOptimizerStep
    rule: UpdateRule
    """Clipping and loss scale."""
    batch_norms: BatchNorms
    meters: Mapping[str, Meter]
    """Metrics of training batches that keep state."""

    def __post_init__(self) -> None:
        self.packing, self.clock = self.passes.packing, self.context.clock
        self.judge = UpdateJudge(self.clock, self.rule)
        self.functions: UpdateFunctions | None = None

    @property
    def reducer_name(self) -> str | None:
        return self.reducers.used.name if self.reducers.used else None

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.packing.pieces.layout.gradients

    @own_errors()
    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        """Forward and backward are one function, so their time counts as Phase.BACKWARD."""
        self.passes.refuse_switched()
        batches = [on_device(batch) for batch in micro_batches]
        self.clock.mark(Phase.TO_DEVICE)
        reducer = self.reducers.chosen(self._rehearsal(batches, global_samples))
        if self.functions is None or self.functions.reducer is not reducer:
            self.functions = UpdateFunctions(self.passes, self.optimizer_step, reducer, self.judge)
        try:
            with self.batch_norms.update(len(batches)):
                share, scale = self._scalars(global_samples)
                if len(batches) == 1:
                    self.batch_norms.begin_micro_batch(0)
                    values, *seen = self.functions.whole(batches[0], share, scale)
                else:
                    gradients, seen = self._gradients(batches, global_samples)
                    values = self.functions.complete(gradients, scale)
                self.judge.read(values, self.functions.timed)
        except (tf.errors.OpError, NotFinite) as error:
            if self.judge.finite.numpy() and not isinstance(error, NotFinite):
                raise
            gradients, _ = self._gradients(batches, global_samples)
            own = all(np.isfinite(np.asarray(piece)).all() for piece in gradients)
            raise ranks_at_fault(NotFinite(), self.context.world.data, own, LOSS_OR_GRADIENT) from error
        self.clock.mark(Phase.OPTIMIZER)
        scores: Scores = {}
        for (found, outputs), batch, host in zip(seen, batches, micro_batches, strict=True):
            add(scores, found)
            for meter in self.meters.values():
                meter.update(Seen(outputs, batch, host, to_host))
        loss, weight = self.judge.own
        return UpdateResult.of((loss * global_samples, weight * global_samples), self.judge.norm, scores)

    def _rehearsal(self, batches: Sequence[Tensors], global_samples: int) -> Callable[[KerasReducer], None]:
        """Returns a rehearsal of the exchange of these batches' gradients."""
        sums: dict[int, Callable[..., Any]] = {}

        def rehearse(reducer: KerasReducer) -> None:
            add_up = sums.setdefault(id(reducer), tf.function(reducer.sum, autograph=False))
            with self.batch_norms.update(len(batches)):
                gradients, _ = self._gradients(batches, global_samples)
                _, pieces = self.packing.apart(gradients)
                np.asarray(add_up(pieces)[-1])  # waits for the device

        return rehearse

    def dry_call(self, batch: HostBatch) -> Flops | None:
        try_training(self.context.task, self.passes, on_device(copied(batch)))
        return training_flops(self.context.task, self.passes, on_device(copied(batch)))

    def close(self) -> None:
        self.reducers.close()

    def _gradients(
        self, batches: Sequence[Tensors], global_samples: int
    ) -> tuple[list[tf.Tensor], list[tuple[Scores, Any]]]:
        """This rank's gradients, zeros if its part of the batch is empty; and what metrics need of each batch."""
        tensors: list[tf.Tensor] = []
        seen = []
        for index, batch in enumerate(batches):
            self.batch_norms.begin_micro_batch(index)
            more, one = self.passes.gradients(batch, *self._scalars(global_samples))
            tensors = self.packing.added(tensors, more) if tensors else more
            seen.append(one)
        return tensors or self.packing.zeros(), seen

    def _scalars(self, global_samples: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Each sample's weight, 1 / global_samples, and the loss scale."""
        return tf.constant(1.0 / global_samples, tf.float64), tf.constant(self.rule.scale, tf.float64)

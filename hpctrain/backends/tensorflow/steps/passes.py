"""Forward, backward and update of a Keras task as TensorFlow functions, each traced once for batches of any size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, cast

import keras
import tensorflow as tf

from hpctrain.backends.keras.keras_compiled import CompiledLoss
from hpctrain.backends.keras.keras_model import InMode, evaluates_itself
from hpctrain.backends.tensorflow import sparse_sums
from hpctrain.backends.tensorflow.task.keras_sync_batchnorm import KerasSyncBatchNorm
from hpctrain.backends.tensorflow.task.overrides import Apply, tested
from hpctrain.comm.world import World
from hpctrain.config.sections import TrainConfig
from hpctrain.errors import UserError
from hpctrain.reduce.flat_layout import LOSS, WEIGHT, WEIGHTED
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.system.user_errors import words
from hpctrain.tasks.definition import KerasTask
from hpctrain.tasks.meters import require_metrics
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import HostBatch, StepSettings

Tensors = Mapping[str, tf.Tensor]
Scores = dict[str, tuple[tf.Tensor, tf.Tensor]]
"""(sum, weight) by name."""
Passed = tuple[list[tf.Tensor], tuple[Scores, Any]]
"""Packed gradients of a pass; scores of its batch and its outputs, as far as ``train.metrics`` needs them."""
_AS_GRAPH = tf.__internal__.autograph.control_status_ctx()
"""AutoGraph's state outside TensorFlow functions, in which explicit conversion is enabled."""


class BatchFunction:
    """A TensorFlow function of a batch of any size: a smaller last batch causes no retracing."""

    def __init__(self, function: Callable[..., Any], compiled: bool) -> None:
        self.function = tf.function(function, jit_compile=compiled or None, autograph=False)
        self.by_structure: dict[tuple[Any, ...], Any] = {}

    def __call__(self, batch: Tensors, *scalars: tf.Tensor) -> Any:
        structure = tuple((name, value.dtype, *value.shape[1:]) for name, value in batch.items())
        if structure not in self.by_structure:
            self.by_structure[structure] = self._trace(batch, scalars)
        return self.by_structure[structure](dict(batch), *scalars)

    def _trace(self, batch: Tensors, scalars: Sequence[tf.Tensor]) -> Any:
        spec = {name: tf.TensorSpec((None, *value.shape[1:]), value.dtype) for name, value in batch.items()}
        try:
            return self.function.get_concrete_function(spec, *[tf.TensorSpec((), scalar.dtype) for scalar in scalars])
        except Exception as error:  # AutoGraph wraps errors of traced code
            if isinstance(error.__context__, UserError):
                raise error.__context__ from None
            if "ag_error_metadata" in vars(error):
                what = f"the task cannot be traced: {type(error).__name__}: {words(error)}{traced_line(error)}"
                raise UserError(
                    what, "use TensorFlow or Keras operations there: this code runs once, as a graph"
                ) from error
            raise


def traced_line(error: Any) -> str:
    """The innermost line of converted user code, as ' (task.py:12: `code`)'; empty if there is none."""
    frames = [frame for frame in error.ag_error_metadata.translated_stack if frame.is_converted]
    return f" ({PurePath(frames[0].filename).name}:{frames[0].lineno}: `{frames[0].code}`)" if frames else ""


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Applies AutoGraph to a task's loss or metric, which turns Python's ``if`` and ``for`` over tensors into graph
    operations.

    Our own code has none of these, and converting it would take longer than tracing it.
    """
    if isinstance(function, CompiledLoss) or not tf.inside_function():
        return function
    return cast(Callable[..., Any], tf.__internal__.autograph.tf_convert(function, _AS_GRAPH))


class KerasPasses:
    """Forward, backward and evaluation passes of one task over a batch."""

    def __init__(
        self,
        task: KerasTask,
        packing: sparse_sums.Gradients,
        sparse: str,
        compiled: bool,
        averages: Sequence[tf.Variable] = (),
        joint: KerasSyncBatchNorm | None = None,
        reports: Sequence[str] = (),
    ) -> None:
        """
        Args:
            task: the task.
            packing: packs the gradients of the trainable variables.
            sparse: ``reduce.sparse``.
            compiled: whether XLA compiles the passes.
            averages: EMA weights that replace the trainable variables in evaluation and prediction; may be empty.
            joint: joins the statistics of BatchNormalization layers over ranks; None to keep them per rank.
            reports: ``train.metrics``.
        """
        self.reports = reports
        self.joint = joint
        self.task = task
        self.variables = task.model.trainable_variables
        self.trained = [(variable, variable.trainable) for variable in task.model.weights]
        """Each weight, and whether it was trainable at the start."""
        self.packing = packing
        by_rows = bool(packing.rows_of) and sparse_sums.updates_rows_alone(task.optimizer)
        self.by_rows = packing.rows_of if by_rows else []
        """Tables that are updated by rows."""
        self.sparse = sparse
        self.weighted: bool | None = None
        """Whether the task's loss returns a weight; None until traced."""
        self.averages = averages
        self.gradients = BatchFunction(self._gradients if joint is None else self._joint_gradients, compiled)
        """gradients(batch, share, loss_scale) -> packed gradients of (sum of the loss) * share * loss_scale, and what
        ``train.metrics`` needs (see ``_seen``).

        ``share`` is 1 / samples of the global batch. The slots do not include the loss scale.
        """
        self.evaluate = BatchFunction(self._evaluate, compiled)
        """evaluate(batch) -> {name: (sum, weight)}, and the outputs."""
        self.predict = BatchFunction(self._predict, compiled)
        """predict(batch) -> outputs of the model."""

    def refuse_switched(self) -> None:
        """Raises UserError if a layer was frozen or thawed, which a traced step would ignore."""
        for variable, trainable in self.trained:
            if variable.trainable != trainable:
                verb = "frozen" if trainable else "thawed"
                what = f"{variable.path} was {verb} during training, which a compiled step does not see"
                raise UserError(what, "set trainable in the task; another run can begin with these weights: init_from")

    def _gradients(self, batch: Tensors, share: tf.Tensor, loss_scale: tf.Tensor) -> Passed:
        with tf.GradientTape() as tape:
            outputs = self.outputs(batch, training=True)
            loss = self._loss(outputs, batch)
            share, loss_scale = tf.cast(share, loss.total.dtype), tf.cast(loss_scale, loss.total.dtype)
            target = loss.total * share * loss_scale
        self.weighted = loss.weighted
        refuse_late_weights(self.variables, self.task.model)
        gradients = tape.gradient(target, [variable.value for variable in self.variables])
        if all(gradient is None for gradient in gradients):
            raise loss_of_nothing()
        known = refused_or_dense(self.packing, self.variables, gradients, self.sparse)
        slots = {LOSS: loss.total * share, WEIGHT: loss.weight * share, WEIGHTED: float(loss.weighted)}
        return self.packing.pack_with(known, slots), self._seen(outputs, batch)

    def _joint_gradients(self, batch: Tensors, share: tf.Tensor, loss_scale: tf.Tensor) -> Passed:
        assert self.joint is not None, "see __init__"
        with self.joint.traced():
            gradients, seen = self._gradients(batch, share, loss_scale)
            return self.joint.before(gradients), seen

    def _seen(self, outputs: Any, batch: Tensors) -> tuple[Scores, Any]:
        """(sum, weight) of the metrics of a training batch that are means, and the outputs if others need them."""
        if not self.reports:
            return {}, ()
        means = {name: metric for name, metric in self.task.mean_metrics.items() if name in self.reports}
        scores = self._scores(means, outputs, batch)
        require_metrics(self.reports, {**self.task.metrics, **scores})
        found = {name: scores[name] for name in self.reports if name in scores}
        return found, outputs if len(found) < len(self.reports) else ()

    def _evaluate(self, batch: Tensors) -> tuple[Scores, Any]:
        with self._average_weights():
            if evaluates_itself(self.task.model):
                return tested(self.task, batch), ()
            outputs = self.outputs(batch, training=False)
            loss = self._loss(outputs, batch)
            scores = self._scores(self.task.mean_metrics, outputs, batch)
        return {**scores, "loss": (loss.total, loss.weight)}, outputs

    def _scores(self, means: Mapping[str, Callable[[Any, Any], Any]], outputs: Any, batch: Tensors) -> Scores:
        """(sum, weight) of these metrics, and of compiled ones, by name."""
        judged = {name: converted(metric)(outputs, batch) for name, metric in means.items()}
        if isinstance(self.task.loss, CompiledLoss):
            judged |= self.task.loss.scores(outputs, batch)
        scores = {name: score_of(score, batch) for name, score in judged.items()}
        return {name: (score.total, score.weight) for name, score in scores.items()}

    def _predict(self, batch: Tensors) -> Any:
        with self._average_weights():
            if type(self.task.model).predict_step is not keras.Model.predict_step:
                outputs = self.task.model.predict_step(self.task.fit_data(dict(batch)))
                return tf.nest.map_structure(full_precision, outputs)
            return self.outputs(batch, training=False)

    def _average_weights(self) -> contextlib.AbstractContextManager[Any]:
        pairs = zip(self.task.model.trainable_variables, self.averages, strict=False)
        values = [(variable, tf.cast(average, variable.dtype)) for variable, average in pairs]
        return keras.StatelessScope(values, collect_losses=True) if values else contextlib.nullcontext()

    def outputs(self, batch: Tensors, training: bool) -> Any:
        """Outputs of the model, in full precision."""
        self.task.model._clear_losses()  # left by an earlier trace: InMode, the outermost layer, clears only its own
        with sparse_sums.rows_read_alone(self.by_rows):
            outputs = InMode(functools.partial(self.task.forward, self.task.model))(batch, training=training)
        return None if outputs is None else tf.nest.map_structure(full_precision, outputs)

    def _loss(self, outputs: Any, batch: Tensors) -> BatchScore:
        """The task's loss plus the model's penalties, weighted like the samples."""
        loss = score_of(converted(self.task.loss)(outputs, batch), batch)
        penalties = [tf.cast(penalty, loss.total.dtype) for penalty in self.task.model.losses]
        if not penalties:
            return loss
        return replace(loss, total=loss.total + tf.stop_gradient(loss.weight) * tf.add_n(penalties))


def loss_of_nothing() -> UserError:
    """The error for a loss without gradients."""
    return UserError(
        "loss does not depend on the weights of the Keras model: nothing would be trained",
        "compute it from the outputs with Keras or TensorFlow operations that have gradients, unlike argmax and NumPy",
    )


def refused_or_dense(
    packing: sparse_sums.Gradients, variables: Sequence[keras.Variable], gradients: Sequence[Any], sparse: str
) -> list[Any]:
    """Prepares gradients for the exchange: those of tables stay sparse, all others become dense.

    Args:
        packing: packs the gradients.
        variables: the variables.
        gradients: the gradients, in the same order.
        sparse: ``reduce.sparse``.

    Raises:
        UserError: a gradient is sparse, and that is refused.
    """
    triples = zip(packing.is_table, variables, gradients, strict=True)
    return [given if is_table else dense(variable, given, sparse) for is_table, variable, given in triples]


def dense(variable: keras.Variable, gradient: Any, sparse: str) -> tf.Tensor:
    """Returns a gradient as a dense tensor; zeros for None. Raises UserError if it is sparse and that is refused."""
    if gradient is None:
        return tf.zeros(variable.shape)
    if isinstance(gradient, tf.IndexedSlices) and sparse == "refuse":
        raise UserError(
            f"the gradient of {variable.path} is sparse, and reduce.sparse is refuse",
            "set reduce.sparse: densify, or compute the gradient densely",
        )
    return tf.convert_to_tensor(gradient)


def refuse_late_weights(known: Sequence[keras.Variable], model: keras.Model) -> None:
    """Raises UserError if a forward pass created weights that are unknown to the optimizer and other ranks."""
    ids = {id(variable) for variable in known}
    late = [variable.path for variable in model.trainable_variables if id(variable) not in ids]
    if late:
        raise UserError(
            f"the model made the weight {late[0]} in its first training step, too late to be trained",
            "call each layer once before the task returns, or in every forward pass",
        )


@dataclass(frozen=True)
class BatchScore:
    """A loss or metric of one batch."""

    total: tf.Tensor
    """Sum over the batch."""
    weight: tf.Tensor
    """Divisor for the mean: the number of samples, or the task's weight."""
    weighted: bool
    """Whether the task gave the weight."""


def score_of(score: Any, batch: Tensors, name: str = "the loss or a metric") -> BatchScore:
    """Converts what a loss or metric returned. Raises UserError if it is neither a scalar nor (sum, weight)."""
    weighted = isinstance(score, (tuple, list)) and len(score) == 2
    scalars = [tf.convert_to_tensor(part) for part in (score if weighted else [score])]
    dtype = tf.float64 if scalars[0].dtype == tf.float64 else tf.float32
    scalars = [tf.cast(scalar, dtype) for scalar in scalars]
    if any(scalar.shape.rank != 0 for scalar in scalars):
        raise UserError(
            f"{name} returned {' and '.join(f'a tensor of shape {list(scalar.shape)}' for scalar in scalars)}",
            "return its mean over the samples, a scalar, or (sum, weight), two scalars",
        )
    if weighted:
        return BatchScore(scalars[0], scalars[1], True)
    samples = tf.cast(tf.shape(next(iter(batch.values())))[0], dtype)
    return BatchScore(scalars[0] * samples, samples, False)


def full_precision(value: tf.Tensor) -> tf.Tensor:
    """Casts half-precision outputs to float32 for losses and files; keeps their masks."""
    if value.dtype not in (tf.float16, tf.bfloat16):
        return value
    cast = tf.cast(value, tf.float32)
    mask = keras.src.backend.get_keras_mask(value)
    if mask is not None:
        keras.src.backend.set_keras_mask(cast, mask)
    return cast


@dataclass(eq=False)
class WeightUpdate:
    """Common path of all weight updates, for both programs; the place for changes to gradients."""

    train: TrainConfig
    """The run file's train section."""
    averages: Sequence[tf.Variable] = ()
    """Moving averages of all trained variables, in float32; empty without an EMA."""

    def apply(self, apply: Apply, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
        """Lets an optimizer apply gradients, which are means over the global batch.

        Args:
            apply: the optimizer's ``apply``.
            gradients: one per variable: dense, IndexedSlices for tables updated by rows, None for unchanged variables.
            variables: the variables.
        """
        pairs = zip(gradients, variables, strict=True)
        apply([None if given is None else tf.cast(given, variable.dtype) for given, variable in pairs], variables)

    def follow(self, variables: Sequence[keras.Variable]) -> None:
        """Updates the EMA after an update of all trained variables."""
        for average, variable in zip(self.averages, variables, strict=False):
            difference = average - tf.cast(variable.value, tf.float32)
            average.assign_sub(difference * (1.0 - (self.train.ema_decay or 0.0)))


@dataclass(eq=False)
class KerasOptimizerStep:
    """Applies the optimizer, then updates the EMA."""

    optimizer: keras.optimizers.Optimizer
    variables: Sequence[keras.Variable]
    packing: sparse_sums.Gradients
    weight_update: WeightUpdate

    def __post_init__(self) -> None:
        self.run = tf.function(self._run, jit_compile=self.weight_update.train.compile or None, autograph=False)
        """run(rows, pieces): updates the weights with the global batch's gradients, without slots; True when done."""

    def _run(self, rows: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        gradients = self.packing.unpack(rows, pieces, sparse_sums.updates_rows_alone(self.optimizer))
        with sparse_sums.rows_updated_alone():
            self.weight_update.apply(self.optimizer.apply, gradients, self.variables)
        self.weight_update.follow(self.variables)
        return tf.convert_to_tensor(self.optimizer.iterations) >= 0  # not a variable for an optimizer that accumulates


def on_device(batch: HostBatch) -> dict[str, tf.Tensor]:
    """Copies a host batch to tensors with separate memory, since a model's variable may keep one that it is assigned.

    TensorFlow must be initialized, as it is once there is a model. Takes 2 us per tensor; tf.constant takes 10.
    """
    return {name: tf.__internal__.EagerTensor(array.copy(), None, None) for name, array in batch.items()}


@dataclass(frozen=True)
class KerasStepContext:
    """A task with the settings of its updates."""

    task: KerasTask
    world: World
    config: StepSettings
    clock: StepClock
    choice: ReducerChoice

    @property
    def variables(self) -> list[keras.Variable]:
        """The trained variables."""
        return list(self.task.model.trainable_variables)

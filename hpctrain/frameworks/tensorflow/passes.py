"""Forward, backward and update of a Keras task as TensorFlow functions, each traced once for batches of any size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import keras
import tensorflow as tf

from hpctrain.errors import UserError
from hpctrain.frameworks.tensorflow.compiled import CompiledLoss
from hpctrain.frameworks.tensorflow.overrides import evaluates_itself, predicts_itself, tested
from hpctrain.frameworks.tensorflow.sparse import rows_read_alone, rows_updated_alone, updates_rows_alone
from hpctrain.frameworks.tensorflow.sync_batchnorm import SyncBatchNorm
from hpctrain.reduce.exchange_slots import LOSS, WEIGHT, WEIGHTED
from hpctrain.reduce.tensorflow_sparse import Gradients
from hpctrain.tasks.blame import words
from hpctrain.tasks.definition import KerasTask

Tensors = Mapping[str, tf.Tensor]


class Traced:
    """A TensorFlow function of a batch with any number of samples: a smaller last batch is not traced again."""

    def __init__(self, function: Callable[..., Any], compiled: bool, autograph: bool = True) -> None:
        self.function = tf.function(function, jit_compile=compiled or None, autograph=autograph)
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
        except Exception as error:  # AutoGraph puts errors of its own around those of the code that it traces
            if isinstance(error.__context__, UserError):
                raise error.__context__ from None
            if "ag_error_metadata" in vars(error):
                what = f"the task cannot be traced: {type(error).__name__}: {words(error)}{traced_line(error)}"
                raise UserError(
                    what, "use TensorFlow or Keras operations there: this code runs once, as a graph"
                ) from error
            raise


def traced_line(error: Any) -> str:
    """' (task.py:12)': the innermost line of the user's that AutoGraph has converted."""
    frames = [frame for frame in error.ag_error_metadata.translated_stack if frame.is_converted]
    return f" ({PurePath(frames[0].filename).name}:{frames[0].lineno}: `{frames[0].code}`)" if frames else ""


class InMode(keras.Layer):
    """Calls a function as an outer layer would: every layer called in it learns whether it trains."""

    def __init__(self, function: Callable[[Tensors], Any]) -> None:
        super().__init__(dtype="float32", autocast=False)
        self.function = function

    def call(self, batch: Tensors, training: bool | None = None) -> Any:
        """What the function makes of the batch."""
        return self.function(batch)

    def _open_name_scope(self) -> contextlib.AbstractContextManager[None]:
        """Weights that layers make inside have the paths that they would have without this one around them."""
        return contextlib.nullcontext()


class Passes:
    """What is computed from one batch of one task."""

    def __init__(
        self,
        task: KerasTask,
        travelling: Gradients,
        sparse: str,
        compiled: bool,
        averages: Sequence[tf.Variable] = (),
        joint: SyncBatchNorm | None = None,
    ) -> None:
        """
        Args:
            travelling: the trainable variables' gradients.
            sparse: ``reduce.sparse``.
            compiled: let XLA compile the forward and backward pass.
            averages: what evaluation and prediction use in place of the trainable variables, if there are any.
            joint: what joins the statistics of BatchNormalization layers, if that is wanted on several ranks.
        """
        self.joint = joint
        self.task = task
        self.variables = task.model.trainable_variables
        self.travelling = travelling
        by_rows = bool(travelling.rows_of) and updates_rows_alone(task.optimizer)
        self.by_rows = travelling.rows_of if by_rows else []
        """Tables that are updated by rows alone."""
        self.sparse = sparse
        self.weighted: bool | None = None
        """Whether the task's loss gives a weight, once it is known."""
        self.averages = averages
        self.gradients = Traced(self._gradients if joint is None else self._joint_gradients, compiled)
        """gradients(batch, share, loss_scale) -> what travels: of the loss' sum over the batch times both.

        ``share`` is 1 / samples of the global batch; only gradients have the loss scale in them, not the slots.
        """
        self.evaluate = Traced(self._evaluate, compiled)
        """evaluate(batch) -> {name: (sum, weight)}, and the outputs."""
        self.predict = Traced(self._predict, compiled)
        """predict(batch) -> outputs, as the model gives them."""

    def _gradients(self, batch: Tensors, share: tf.Tensor, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = self._loss(self.outputs(batch, training=True), batch)
            share, loss_scale = tf.cast(share, loss.total.dtype), tf.cast(loss_scale, loss.total.dtype)
            target = loss.total * share * loss_scale
        self.weighted = loss.weighted
        refuse_late_weights(self.variables, self.task.model)
        gradients = tape.gradient(target, [variable.value for variable in self.variables])
        if all(gradient is None for gradient in gradients):
            raise loss_of_nothing()
        known = refused_or_dense(self.travelling, self.variables, gradients, self.sparse)
        slots = {LOSS: loss.total * share, WEIGHT: loss.weight * share, WEIGHTED: float(loss.weighted)}
        return self.travelling.pack_with(known, slots)

    def _joint_gradients(self, batch: Tensors, share: tf.Tensor, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        assert self.joint is not None, "see __init__"
        with self.joint.traced():
            return self.joint.before(self._gradients(batch, share, loss_scale))

    def _evaluate(self, batch: Tensors) -> tuple[dict[str, tuple[tf.Tensor, tf.Tensor]], Any]:
        with self._average_weights():
            if evaluates_itself(self.task.model):
                return tested(self.task, batch), ()
            outputs = self.outputs(batch, training=False)
            judged = {name: metric(outputs, batch) for name, metric in self.task.mean_metrics.items()}
            if isinstance(self.task.loss, CompiledLoss):
                judged |= self.task.loss.scores(outputs, batch)
            scores = {name: score_of(score, batch) for name, score in judged.items()}
            scores["loss"] = self._loss(outputs, batch)
        return {name: (score.total, score.weight) for name, score in scores.items()}, outputs

    def _predict(self, batch: Tensors) -> Any:
        with self._average_weights():
            if predicts_itself(self.task.model):
                outputs = self.task.model.predict_step(self.task.fit_data(dict(batch)))
                return tf.nest.map_structure(full_precision, outputs)
            return self.outputs(batch, training=False)

    def _average_weights(self) -> contextlib.AbstractContextManager[Any]:
        pairs = zip(self.task.model.trainable_variables, self.averages, strict=False)
        values = [(variable, tf.cast(average, variable.dtype)) for variable, average in pairs]
        return keras.StatelessScope(values, collect_losses=True) if values else contextlib.nullcontext()

    def outputs(self, batch: Tensors, training: bool) -> Any:
        """Of the model, in full precision."""
        self.task.model._clear_losses()  # of an earlier trace: only the outermost layer, InMode, clears its own
        with rows_read_alone(self.by_rows):
            outputs = InMode(functools.partial(self.task.forward, self.task.model))(batch, training=training)
        return None if outputs is None else tf.nest.map_structure(full_precision, outputs)

    def _loss(self, outputs: Any, batch: Tensors) -> BatchScore:
        """The task's loss and the model's own penalties, which weigh as much as the samples do."""
        loss = score_of(self.task.loss(outputs, batch), batch)
        penalties = [tf.cast(penalty, loss.total.dtype) for penalty in self.task.model.losses]
        return replace(loss, total=loss.total + loss.weight * tf.add_n(penalties)) if penalties else loss


def loss_of_nothing() -> UserError:
    """A loss without gradients."""
    return UserError(
        "loss does not depend on the weights of the Keras model: nothing would be trained",
        "compute it from the outputs with Keras or TensorFlow operations that have gradients, unlike argmax and NumPy",
    )


def refused_or_dense(
    travelling: Gradients, variables: Sequence[keras.Variable], gradients: Sequence[Any], sparse: str
) -> list[Any]:
    """Gradients as they are exchanged: those of tables as they are, all others dense.

    Args:
        sparse: ``reduce.sparse``.

    Raises:
        UserError: a gradient is sparse, and that is refused.
    """
    triples = zip(travelling.is_table, variables, gradients, strict=True)
    return [given if is_table else dense(variable, given, sparse) for is_table, variable, given in triples]


def dense(variable: keras.Variable, gradient: Any, sparse: str) -> tf.Tensor:
    """A gradient; zeros for None. Raises UserError if it is sparse and that is refused."""
    if gradient is None:
        return tf.zeros(variable.shape)
    if isinstance(gradient, tf.IndexedSlices) and sparse == "refuse":
        raise UserError(
            f"the gradient of {variable.path} is sparse, and reduce.sparse is refuse",
            "set reduce.sparse: densify, or compute the gradient densely",
        )
    return tf.convert_to_tensor(gradient)


def refuse_late_weights(known: Sequence[keras.Variable], model: keras.Model) -> None:
    """Raises UserError if a forward pass made weights that no optimizer and no other rank knows."""
    ids = {id(variable) for variable in known}
    late = [variable.path for variable in model.trainable_variables if id(variable) not in ids]
    if late:
        raise UserError(
            f"the model made the weight {late[0]} in its first training step, too late to be trained",
            "call each layer once before the task returns, or in every forward pass",
        )


@dataclass(frozen=True)
class BatchScore:
    """What a loss or metric says of one batch."""

    total: tf.Tensor
    """Sum over the batch."""
    weight: tf.Tensor
    """What to divide the sum by for a mean: samples, or what the task gave."""
    weighted: bool
    """Whether the task gave the weight."""


def score_of(score: Any, batch: Tensors, name: str = "the loss or a metric") -> BatchScore:
    """Reads what a task's loss or metric returned; raises UserError if it is neither a scalar nor (sum, weight)."""
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
        return BatchScore(scalars[0], tf.stop_gradient(scalars[1]), True)
    samples = tf.cast(tf.shape(next(iter(batch.values())))[0], dtype)
    return BatchScore(scalars[0] * samples, samples, False)


def full_precision(value: tf.Tensor) -> tf.Tensor:
    """Half-precision outputs in float32, for losses and files; their masks stay."""
    if value.dtype not in (tf.float16, tf.bfloat16):
        return value
    cast, mask = tf.cast(value, tf.float32), keras.src.backend.get_keras_mask(value)
    if mask is not None:
        keras.src.backend.set_keras_mask(cast, mask)
    return cast


class Update:
    """The optimizer's step, then the EMA of the weights: into ``averages``, in float32, if there are any."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
        travelling: Gradients,
        compiled: bool,
        averages: Sequence[tf.Variable] = (),
        ema_decay: float = 0.0,
    ) -> None:
        self.optimizer = optimizer
        self.variables = variables
        self.travelling = travelling
        self.averages = averages
        self.ema_decay = ema_decay
        self.run = tf.function(self._run, jit_compile=compiled or None)
        """run(rows, pieces) -> True: with gradients of the global batch; slots are left out."""

    def _run(self, rows: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        unpacked = self.travelling.unpack(rows, pieces, updates_rows_alone(self.optimizer))
        gradients = zip(unpacked, self.variables, strict=True)
        given = [tf.cast(gradient, variable.dtype) for gradient, variable in gradients]
        with rows_updated_alone():
            self.optimizer.apply(given, self.variables)
        followed(self.averages, self.variables, self.ema_decay)
        return tf.convert_to_tensor(self.optimizer.iterations) >= 0  # of one that accumulates it is no variable


def followed(averages: Sequence[tf.Variable], variables: Sequence[keras.Variable], decay: float) -> None:
    """Moves averages on by one update of the variables, if there are any."""
    for average, variable in zip(averages, variables, strict=False):
        average.assign_sub((average - tf.cast(variable.value, tf.float32)) * (1.0 - decay))

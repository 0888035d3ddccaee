"""Keras models of many kinds, each with its data and training settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from hpctrain.tasks.definition import first_field
from tests.support.sweep import Batch, numbers
from tests.tasks.tensorflow_layers import CASES, Case


def distance(outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Mean squared distance of all outputs from fixed, distinct numbers."""
    total = 0.0
    for output in tf.nest.flatten(outputs):
        flat = tf.reshape(output, (tf.shape(output)[0], -1))
        total += tf.reduce_mean(
            tf.square(flat - tf.cast(tf.sin(tf.range(tf.shape(flat)[1], dtype=tf.float32)), flat.dtype))
        )
    return total


@dataclass(frozen=True)
class Problem:
    """A model and its training."""

    model: Callable[[], keras.Model]
    fields: Batch
    """Arrays of all samples."""
    forward: Callable[[Any, Any], Any] = first_field
    loss: Callable[[Any, Any], Any] = distance
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.SGD(0.1, momentum=0.9)
    train: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the ``train`` section."""
    accuracy: float = 1e-6
    """Largest allowed difference from one process."""


def of_layer(case: Case) -> Problem:
    """A problem with a single layer."""
    return Problem(case.model, {"x": case.samples()})


def several_inputs_and_outputs() -> keras.Model:
    """A model with two inputs and named outputs."""
    first, second = keras.Input((4,), name="x"), keras.Input((2, 3), name="z")
    both = layers.Concatenate()([layers.Dense(3)(first), layers.Flatten()(layers.Dense(2)(second))])
    return keras.Model({"x": first, "z": second}, {"near": layers.Dense(2)(both), "far": layers.Dense(3, "tanh")(both)})


class Block(keras.Model):
    """A subclassed model built at its first call, with a list of layers and one used in training only."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.steps = [layers.Dense(6, "tanh"), layers.LayerNormalization(), layers.Dense(width)]
        self.only_in_training = layers.Dense(width)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Outputs as wide as the inputs."""
        outputs = inputs
        for step in self.steps:
            outputs = step(outputs)
        return inputs + (self.only_in_training(outputs) if training else outputs)


def nested() -> keras.Model:
    """A functional model in a sequential one in a functional one, around a subclassed model."""
    inside = keras.Input((5, 4))
    functional = keras.Model(inside, layers.Dense(4)(Block()(inside)))
    inputs = keras.Input((5, 4))
    return keras.Model(inputs, keras.Sequential([functional, layers.Flatten(), layers.Dense(2)])(inputs))


def shared() -> keras.Model:
    """A model that uses one layer three times and one model twice."""
    inputs = keras.Input((4,))
    layer, model = layers.Dense(4, "tanh"), keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    return keras.Model(inputs, layer(model(layer(layer(model(inputs))))))


class Penalized(layers.Layer):
    """A layer that adds two losses, one a mean over the samples and one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def build(self, shape: Any) -> None:
        """Build the inner layer."""
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        """Outputs of the inner layer."""
        outputs = self.dense(inputs)
        self.add_loss(0.3 * ops.mean(ops.square(outputs)))
        self.add_loss(0.1 * ops.sum(ops.abs(self.dense.kernel)))
        return outputs


class Counting(layers.Layer):
    """A layer that keeps a metric and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any) -> Any:
        """Return the inputs."""
        self.seen.update_state(inputs)
        self.calls.assign_add(1.0)
        return inputs


def sequential(*inner: Any, shape: tuple[int, ...] = (4,)) -> keras.Model:
    """A sequential model of these layers."""
    return keras.Sequential([keras.Input(shape), *inner])


def frozen() -> keras.Model:
    """A model whose middle layer is frozen."""
    model = sequential(layers.Dense(4), layers.Dense(4), layers.Dense(2))
    model.layers[1].trainable = False
    return model


def adapted() -> keras.Model:
    """A model that trains a low-rank change of a frozen kernel."""
    model = sequential(layers.Dense(4), layers.Dense(2))
    model.layers[0].enable_lora(2)
    return model


def regularized() -> keras.Model:
    """A model with regularisers of weights and of outputs."""
    return sequential(
        layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1), bias_regularizer="l1"),
        layers.Dense(3, activity_regularizer=keras.regularizers.L1L2(0.1, 0.1)),
    )


def constrained() -> keras.Model:
    """A model with a kernel of limited norm."""
    return sequential(layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.5)), layers.Dense(3))


def partly(dtype: str) -> keras.Model:
    """A model whose middle layer has a different dtype."""
    return sequential(layers.Dense(4), layers.Dense(4, dtype=dtype), layers.Dense(2))


def masked() -> keras.Model:
    """A model whose layers after the embedding mask padding."""
    inputs = keras.Input((5,), dtype="int64")
    hidden = layers.GRU(4, return_sequences=True)(layers.Embedding(7, 3, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.LSTM(3)(hidden))


def unused() -> keras.Model:
    """A model with an output that the loss does not use."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(3)(inputs)])


def weighted(outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """Weighted squares of the outputs, as (sum, weight)."""
    weights = tf.abs(batch["w"])
    return tf.reduce_sum(weights * tf.reduce_sum(tf.square(outputs), 1)), tf.reduce_sum(weights)


class Remembering(keras.optimizers.SGD):
    """An optimizer that adds half of the previous gradient, which it stores unchanged."""

    def build(self, variables: Any) -> None:
        """Make one slot per variable."""
        super().build(variables)
        self.before = [self.add_variable_from_reference(variable, "before") for variable in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """See keras.optimizers.Optimizer."""
        before = self.before[self._get_variable_index(variable)]
        self.assign_sub(variable, learning_rate * (gradient + 0.5 * before))
        self.assign(before, gradient)


def own_optimizers() -> dict[str, Callable[[], keras.optimizers.Optimizer]]:
    """All optimizers of Keras with default settings, except the base class and those that wrap others."""
    classes = {name: cls for name, cls in vars(keras.optimizers).items() if isinstance(cls, type)}
    return {
        name: cls
        for name, cls in sorted(classes.items())
        if issubclass(cls, keras.optimizers.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    }


ROW, ROWS = {"x": numbers((4,))}, {"x": numbers((5, 4))}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    **own_optimizers(),
    "of one's own": lambda: Remembering(0.1),
    "weight decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}

PROBLEMS: dict[str, Problem] = {
    "several inputs and outputs": Problem(
        several_inputs_and_outputs, {"x": numbers((4,)), "z": numbers((2, 3))}, lambda model, batch: model(dict(batch))
    ),
    "subclassed": Problem(Block, ROWS),
    "nested": Problem(nested, ROWS),
    "shared layers": Problem(shared, ROW),
    "layer of its own dtype, float64": Problem(lambda: partly("float64"), ROW),
    "layer of its own dtype, mixed_bfloat16": Problem(lambda: partly("mixed_bfloat16"), ROW, accuracy=1e-2),
    "layer of its own dtype, bfloat16": Problem(lambda: partly("bfloat16"), ROW, accuracy=3e-2),
    "float64": Problem(lambda: with_policy("float64", regularized), ROW, accuracy=1e-14),
    "mixed precision, bf16": Problem(regularized, ROW, train={"precision": "bf16"}, accuracy=1e-2),
    "mixed precision, fp16": Problem(regularized, ROW, train={"precision": "fp16"}, accuracy=1e-2),
    "add_loss": Problem(lambda: sequential(Penalized(), layers.Dense(2)), ROW),
    "stateful metrics": Problem(lambda: sequential(layers.Dense(3), Counting(), layers.Dense(2)), ROW),
    "regularizers": Problem(regularized, ROW),
    "constraints": Problem(constrained, ROW),
    "frozen layers": Problem(frozen, ROW),
    "low-rank adaptation": Problem(adapted, ROW),
    "masks": Problem(masked, {"x": numbers((5,), 7)}),
    "layer without gradient": Problem(unused, ROW, loss=lambda outputs, batch: distance(outputs[0], batch)),
    "weighted loss": Problem(
        lambda: sequential(layers.Dense(3)), {"x": numbers((4,)), "w": numbers(())}, loss=weighted
    ),
    "compiled": Problem(regularized, ROW, train={"compile": True}),
    "accumulation": Problem(regularized, ROW, train={"accumulate": 2}),
    **{f"optimizer, {name}": Problem(regularized, ROW, optimizer=make) for name, make in OPTIMIZERS.items()},
    "synchronized statistics": Problem(
        lambda: sequential(layers.Dense(3), layers.BatchNormalization(synchronized=True)), ROW
    ),
}


def with_policy(name: str, make: Callable[[], keras.Model]) -> keras.Model:
    """A model made under a dtype policy."""
    keras.config.set_dtype_policy(name)
    return make()


def everything() -> dict[str, Problem]:
    """All problems by name: layers, and kinds of models."""
    return {**{name: of_layer(case) for name, case in CASES.items()}, **PROBLEMS}

"""The first-batch check of Keras tasks finds losses that ranks and micro-batches cannot average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from hpctrain.backends.keras.keras_compiled import as_loss
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.tasks.definition import KerasTask, PerBatch
from tests.tasks.keras_own_steps import framework_of
from tests.unit.backends.tensorflow.test_keras_compiled import class_of, data, one_output

IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)


def squares(targets: Any, outputs: Any) -> Any:
    return (outputs[:, 0] - ops.cast(targets, "float32")) ** 2


def dry_call(loss: Any, compiled: bool = False, **more: Any) -> None:
    whole = {name: data()[name][:17] for name in ("x", "y")}
    model = one_output(optimizer="sgd", **({"loss": loss} if compiled else {}))
    fields = {"fit_data": lambda batch: (batch["x"], batch["y"])} if compiled else {"loss": loss}
    framework_of(lambda: KerasTask(model, train=whole, **fields, **more), alone()).dry_call(whole)


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda targets, outputs: ops.sum(squares(targets, outputs)),
    "root": lambda targets, outputs: ops.sqrt(ops.mean(squares(targets, outputs))),
    "ratio": lambda targets, outputs: ops.sum(squares(targets, outputs)) / ops.sum(1.0 + ops.cast(targets, "float32")),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_that_is_no_mean_is_refused(name, compiled):
    function = SUMS[name]
    loss = function if compiled else lambda outputs, batch: function(batch["y"], outputs)
    with pytest.raises(UserError, match=r"(?s)loss is not a mean .* for 2 samples, .* return \(sum, weight"):
        dry_call(loss, compiled)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, batch: ops.mean(squares(batch["y"], outputs)),
        lambda outputs, batch: (ops.sum(squares(batch["y"], outputs)), len(outputs)),
        PerBatch(lambda outputs, batch: ops.sum(squares(batch["y"], outputs))),
        "sparse_categorical_crossentropy",
        IGNORING,
    ],
)
def test_a_loss_that_can_be_averaged_is_accepted(loss):
    dry_call(loss)


def test_compiled_losses_are_accepted_and_those_that_ignore_a_class_refused():
    dry_call(class_of, compiled=True)
    with pytest.raises(UserError, match="sparse_categorical_crossentropy is not the plain mean"):
        dry_call(IGNORING, compiled=True)


class Small(keras.layers.Layer):
    """Penalizes what it passes on."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, x: Any) -> Any:
        self.add_loss(self.reduce(x**2))
        return x


@pytest.mark.parametrize("is_mean", [False, True])
def test_penalties_of_layers_are_means(is_mean):
    """Beside a regularizer, which is the same for any samples."""
    layers = [keras.layers.Dense(1, kernel_regularizer="l2"), Small(ops.mean if is_mean else ops.sum)]
    whole = {name: data()[name][:17] for name in ("x", "y")}
    model = keras.Sequential([keras.Input(whole["x"].shape[1:]), *layers])
    model.compile("sgd", "mse")
    given = KerasTask(model, train=whole, fit_data=lambda batch: (batch["x"], batch["y"]))
    framework = framework_of(lambda: given, alone())
    if is_mean:
        return framework.dry_call(whole)
    with pytest.raises(UserError, match=r"(?s)what layers give to add_loss is not a mean .*add_loss\(keras.ops.mean"):
        framework.dry_call(whole)


def test_two_losses_are_no_sum_and_weight():
    with pytest.raises(UserError, match=r"(?s)weight that depends on the model's parameters.*return the sum"):
        dry_call(lambda outputs, batch: (ops.sum(squares(batch["y"], outputs)), ops.sum(outputs**2)))


def test_a_loss_that_ignores_a_class_is_weighted_by_what_counts():
    random = np.random.default_rng(0)
    outputs, targets = random.normal(size=(9, 3)).astype(np.float32), np.array([2, 2, 0, 1, 2, 0, 0, 1, 1])
    loss = as_loss(IGNORING, ("x", "y"))
    parts = [loss(outputs[rows], {"y": targets[rows]}) for rows in (slice(0, 4), slice(4, 9))]
    total, weight = (sum(map(float, values)) for values in zip(*parts, strict=True))
    assert weight == 6
    assert total / weight == pytest.approx(float(IGNORING(targets, outputs)), rel=1e-5)


def test_a_marked_loss_trains():
    """It is converted and traced like any other function."""
    from tests.tasks.keras_own_steps import train

    loss = PerBatch(lambda outputs, batch: ops.sum(squares(batch["y"], outputs)))
    whole = {name: data()[name] for name in ("x", "y")}
    framework = framework_of(lambda: KerasTask(one_output(optimizer="sgd"), loss, train=whole), alone())
    assert len(train(framework, 2)) == 2

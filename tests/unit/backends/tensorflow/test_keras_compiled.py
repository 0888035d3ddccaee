"""Compiled Keras models: loss, metrics and optimizer of ``compile`` are the task's, and mean what they mean there."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from hpctrain.backends.keras.keras_compiled import adopted, inputs_of, reported
from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.tasks.definition import KerasTask
from tests.tasks.keras_own_steps import framework_of, global_batches, train


def data() -> dict[str, np.ndarray]:
    """Points, classes and weights of samples."""
    random = np.random.default_rng(5)
    x = random.normal(size=(183, 12)).astype(np.float32)
    return {"x": x, "y": x[:, :3].argmax(1), "w": random.uniform(0, 2, 183).astype(np.float32)}


def two(batch: Any) -> Any:
    """x and y by the names of the outputs."""
    return batch["x"], {"kind": batch["y"], "size": batch["w"]}


def one_output(**compile: Any) -> keras.Model:
    """A classifier."""
    model = keras.Sequential([keras.Input((12,)), layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dense(3)])
    model.compile(**compile)
    return model


def two_outputs(**compile: Any) -> keras.Model:
    """Outputs by name."""
    inputs = keras.Input((12,))
    hidden = layers.Dense(8, "tanh")(inputs)
    model = keras.Model(
        inputs, {"kind": layers.Dense(3, name="kind")(hidden), "size": layers.Dense(1, name="size")(hidden)}
    )
    model.compile(**compile)
    return model


def class_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def class_of(target: Any, outputs: Any) -> Any:
    """One value a sample: a loss of the user's own."""
    return keras.losses.sparse_categorical_crossentropy(target, outputs, from_logits=True)


def right(target: Any, outputs: Any) -> Any:
    """Whether each sample is classified rightly."""
    return keras.ops.cast(keras.ops.equal(keras.ops.argmax(outputs, 1), target), "float32")


def test_what_evaluations_report_is_known_once_the_model_has_been_tried():
    """A watched metric that is not among it was refused after the first epoch."""
    model = two_outputs(loss={"kind": class_loss(), "size": "mse"}, metrics={"kind": ["accuracy"]}, optimizer="sgd")
    fit = KerasTask(model, train=data(), validation=data(), fit_data=two, metrics={"far": lambda outputs, batch: 1.0})
    framework = framework_of(lambda: fit, alone())
    framework.dry_call(data(), [data()])
    assert sorted(reported(framework.task)) == sorted(framework.evaluate(data())) == ["far", "kind_accuracy", "loss"]


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "object": (one_output, lambda batch: (batch["x"], batch["y"]), {"loss": class_loss, "metrics": ["accuracy"]}),
    "function": (
        one_output,
        lambda batch: (batch["x"], batch["y"]),
        {"loss": lambda: class_of, "metrics": ["accuracy"]},
    ),
    "weighted": (
        one_output,
        lambda batch: (batch["x"], batch["y"], batch["w"]),
        {"loss": class_loss, "metrics": ["accuracy"], "weighted_metrics": [right]},
    ),
    "two outputs": (
        two_outputs,
        two,
        {
            "loss": lambda: {"kind": class_loss(), "size": "mse"},
            "loss_weights": {"kind": 1.0, "size": 0.3},
            "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_trains_and_is_evaluated_as_keras_does(name):
    model, fit_data, settings = CASES[name]
    settings = {**settings, "loss": settings["loss"]()}

    def make():
        compiled = model(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), **settings)
        return KerasTask(compiled, train=data(), validation=data(), fit_data=fit_data)

    framework = framework_of(make, alone(), accumulate=2)
    steps = train(framework, 8)
    begin_task(7)
    plain = model(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), **settings)
    for ours, batch in zip(steps, global_batches(framework.task, 8), strict=True):
        x, y, w = keras.utils.unpack_x_y_sample_weight(fit_data(batch))
        plain.reset_metrics()
        logs = plain.train_on_batch(x, y, w, return_dict=True)
        total, weight = ours["loss"]
        assert total / weight == pytest.approx(float(logs["loss"]), rel=1e-4)
    for ours, theirs in zip(framework.task.model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-6)
    x, y, w = keras.utils.unpack_x_y_sample_weight(fit_data(data()))
    wanted = plain.evaluate(x, y, batch_size=183, sample_weight=w, verbose=0, return_dict=True)
    wanted = {key: value for key, value in wanted.items() if not key.endswith("_loss")}
    batches = [{key: array[begin : begin + 50] for key, array in data().items()} for begin in range(0, 183, 50)]
    found = [framework.evaluate(batch) for batch in batches]
    assert set(found[0]) == set(wanted)
    for key, value in wanted.items():
        total, weight = np.sum([each[key] for each in found], axis=0)
        assert total / weight == pytest.approx(value, rel=1e-4), key


def made(fit_data: Any = None, validation: Any = None, **settings: Any) -> KerasFramework:
    """A framework of a compiled classifier."""
    fields = {} if fit_data is None else {"fit_data": fit_data}
    whole = data() if fit_data else {name: data()[name] for name in ("x", "y")}
    return framework_of(
        lambda: KerasTask(one_output(optimizer="sgd", **settings), train=whole, validation=validation, **fields),
        alone(),
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sum": (
        {"loss": keras.losses.SparseCategoricalCrossentropy(reduction="sum")},
        "not the plain mean over the samples",
    ),
    "no loss": ({}, "neither the task nor compile has a loss"),
    "one array": ({"loss": class_of, "fit_data": lambda batch: batch["x"]}, "compile's loss needs x, y and perhaps"),
    "weights": (
        {
            "loss": keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
            "fit_data": lambda batch: (batch["x"], batch["y"], batch["w"]),
        },
        "divides by the sum of the sample weights",
    ),
    "metric": (
        {"loss": class_of, "metrics": [keras.metrics.AUC(name="auc")]},
        "metric auc is of class AUC, which is not a mean",
    ),
    "root of a mean": (
        {"loss": class_of, "metrics": [keras.metrics.RootMeanSquaredError(name="root")]},
        "metric root is of class RootMeanSquaredError, which is not a mean",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_compile_says_and_ranks_could_not_average_is_refused_by_name(name):
    settings, said = REFUSED[name]
    with pytest.raises(UserError, match=said):
        made(**settings)


def test_a_model_of_another_framework_is_refused():
    with pytest.raises(UserError, match="model of the KerasTask is a partial"):
        adopted(KerasTask(functools.partial(print), "mse"), ["x", "y"])


def test_an_error_names_fit_data_if_the_model_is_compiled_and_forward_if_not():
    arrays = {name: data()[name] for name in ("x", "y")}
    compiled = adopted(KerasTask(one_output(optimizer="sgd", loss=class_of), train=arrays), list(arrays))
    assert "fit_data=lambda batch" in inputs_of(compiled, arrays)
    assert inputs_of(KerasTask(compiled.model), arrays).startswith("forward(model, batch) gets")


def test_fields_of_the_task_come_before_what_compile_says():
    def loss(outputs, batch):
        return keras.ops.mean(outputs**2)

    optimizer = keras.optimizers.Adam(0.5)
    task = KerasTask(one_output(optimizer="sgd", loss=class_of), loss, optimizer, data())
    framework = framework_of(lambda: task, alone())
    assert framework.task.loss is loss and framework.task.optimizer is optimizer


def test_the_loss_scale_that_compile_adds_for_fp16_is_the_runs():
    def make():
        return KerasTask(one_output(optimizer="sgd", loss=class_loss()), train={k: data()[k] for k in ("x", "y")})

    framework = framework_of(make, alone(), precision="fp16")
    assert isinstance(framework.task.optimizer, keras.optimizers.SGD) and framework.source.loss_scale is not None


def test_a_loss_object_is_refused_where_a_mask_would_weigh_samples():
    ids = np.random.default_rng(0).integers(0, 7, (40, 5))

    def make():
        inputs = keras.Input((5,), dtype="int64")
        hidden = layers.LSTM(4, return_sequences=True)(layers.Embedding(7, 3, mask_zero=True)(inputs))
        model = keras.Model(inputs, layers.Dense(7)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return KerasTask(model, loss, keras.optimizers.SGD(0.1), {"x": ids, "y": ids})

    with pytest.raises(UserError, match="the outputs carry a mask"):
        framework_of(make, alone()).dry_call({"x": ids[:8], "y": ids[:8]})

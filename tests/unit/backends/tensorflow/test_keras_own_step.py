"""Keras models with a ``train_step`` of their own: as Keras trains them, with their state, and refusals by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.task.overrides import intercepted
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.framework import NonFiniteLoss
from tests.tasks import keras_own_steps
from tests.tasks.keras_own_steps import (
    Late,
    framework_of,
    gan,
    gan_task,
    global_batches,
    numbers,
    train,
    vae_task,
)


def saved(framework: KerasFramework) -> dict[str, np.ndarray]:
    arrays = {}
    for tensor in framework.state():
        arrays[tensor.name] = np.empty(tensor.shape, tensor.dtype)
        tensor.copy_into(arrays[tensor.name])
    return arrays


def weights(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.trainable_variables]


def test_two_optimizers_train_as_keras_does():
    framework = framework_of(gan_task, alone())
    found = train(framework, 30)
    begin_task(7)
    plain = gan()
    plain.make_train_function()
    for ours, batch in zip(found, global_batches(framework.task, 30), strict=True):
        plain.reset_metrics()
        logs = plain.train_function(iter([tuple(tf.constant(array) for array in batch.values())]))
        for name, value in logs.items():
            total, weight = ours[name]
            assert total / weight == pytest.approx(float(value), rel=1e-5)
    for own, other in zip(weights(framework.task.model), weights(plain), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "settings"),
    [(vae_task, {}), (gan_task, {"ema_decay": 0.9}), (vae_task, {"precision": "bf16"})],
    ids=["plain", "ema", "bf16"],
)
def test_a_run_goes_on_from_its_state_bit_for_bit(make, settings):
    through = framework_of(make, alone(), **settings)
    train(through, 5)
    arrays = saved(through)
    straight = train(through, 6, skip=5)
    resumed = framework_of(make, alone(), **settings)
    resumed.load(arrays)
    assert train(resumed, 6, skip=5) == straight
    assert {name: array.tobytes() for name, array in saved(resumed).items()} == {
        name: array.tobytes() for name, array in saved(through).items()
    }


def test_optimizers_and_metrics_are_saved_by_the_names_of_the_models_attributes():
    names = set(saved(framework_of(gan_task, alone())))
    assert "optimizer/d_optimizer.velocity/sequential/dense/kernel" in names
    assert "optimizer/g_optimizer.momentum/sequential_1/dense_3/bias" in names
    assert {"held/model/d_loss_metric.0.total", "held/model/g_loss_metric.1.count"} < names


def test_the_schedule_reaches_all_optimizers():
    framework = framework_of(gan_task, alone())
    framework.set_learning_rate(0.5)
    model = framework.task.model
    assert float(model.d_optimizer.learning_rate) == pytest.approx(5e-3)
    assert float(model.g_optimizer.learning_rate) == pytest.approx(0.025)


def test_a_dry_call_leaves_everything_as_it_was():
    framework = framework_of(vae_task, alone())
    before = saved(framework)
    framework.dry_call(global_batches(framework.task, 1)[0])
    after = saved(framework)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    wanted = train(framework_of(vae_task, alone()), 3)
    assert train(framework, 3) == wanted


def test_a_rank_without_samples_leaves_its_own_state_as_it_was():
    framework = framework_of(vae_task, alone())
    train(framework, 1)
    before = saved(framework)
    assert framework.step([], 3).sums()["loss"] == (0.0, 0.0)
    after = saved(framework)
    own = [name for name in before if name.startswith(("rng/", "held/"))]
    assert len(own) > 6 and all(before[name].tobytes() == after[name].tobytes() for name in own)
    assert np.isfinite(after["model/dense/kernel"]).all()
    assert after["optimizer/iteration"] == before["optimizer/iteration"] + 1


def test_test_step_is_the_evaluation_and_the_average_of_the_weights_is_what_it_sees():
    framework = framework_of(vae_task, alone(), ema_decay=0.5)
    train(framework, 4)
    batch = {"picture": keras_own_steps.pictures(40)}
    found = framework.evaluate(batch)
    assert set(found) == {"loss", "kl_loss"} and found["loss"][1] == 40
    for variable, average in zip(framework.task.model.trainable_variables, framework.source.averages, strict=True):
        variable.assign(average)
    logs = framework.task.model.test_step(batch["picture"])
    assert found["loss"][0] / 40 == pytest.approx(float(logs["loss"]), rel=0.02)  # another sample of z


def test_a_gradient_that_is_not_finite_ends_the_step_before_it_reaches_the_weights():
    framework = framework_of(gan_task, alone())
    batch = {name: array.copy() for name, array in global_batches(framework.task, 1)[0].items()}
    batch["picture"][3] = np.nan
    before = framework.weights_hash()
    with pytest.raises(NonFiniteLoss) as caught:
        framework.step([batch], 30)
    assert caught.value.ranks == [0]
    assert framework.weights_hash() == before


def test_layers_that_wait_for_their_first_batch_are_built_without_a_step():
    framework = framework_of(lambda: KerasTask(Late(), train=numbers()), alone())
    state = saved(framework)
    assert "optimizer/optimizers.0.momentum/dense/kernel" in state
    assert not state["model/batch_normalization/moving_mean"].any()
    losses = [step["loss"][0] / step["loss"][1] for step in train(framework, 20)]
    assert losses[-1] < 0.2 * losses[0]
    assert saved(framework)["model/batch_normalization/moving_mean"].any()


class OwnLoss(keras.Model):
    """Keras' own train_step around a loss of its own."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(ops.abs(y_pred[:, 0] - y))


def own_loss() -> KerasTask:
    inputs = keras.Input((4,))
    model = OwnLoss(inputs, layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.1))
    return KerasTask(model, train=numbers(), validation=numbers(40))


def test_a_loss_that_the_model_computes_is_the_one_that_is_trained_and_evaluated():
    framework = framework_of(own_loss, alone())
    losses = [step["loss"][0] / step["loss"][1] for step in train(framework, 60)]
    assert losses[-1] < 0.3 * losses[0]
    batch = numbers(40)
    total, weight = framework.evaluate(batch)["loss"]
    outputs = framework.predict(batch)["output"][:, 0]
    assert total / weight == pytest.approx(float(np.abs(outputs - batch["y"]).mean()), rel=1e-5)


class Doubled(Late):
    """Predicts in its own way."""

    def predict_step(self, data: Any) -> Any:
        return 2 * self(data[0], training=False)


def test_predictions_are_the_models_own():
    framework = framework_of(lambda: KerasTask(Doubled(), train=numbers()), alone())
    batch = numbers(5)
    wanted = 2 * framework.task.model(batch["x"], training=False).numpy()
    np.testing.assert_allclose(framework.predict(batch)["output"], wanted, rtol=1e-5)


def test_a_model_without_a_call_cannot_predict():
    """``hpctrain predict`` ended with a traceback and 70."""
    framework = framework_of(keras_own_steps.vae_task, alone())
    with pytest.raises(UserError, match="has no call method, and the task has no forward"):
        framework.predict({"picture": keras_own_steps.pictures(4)})


def test_what_a_call_itself_has_not_implemented_is_not_taken_for_a_missing_call():
    class Unfinished(Late):
        def predict_step(self, data):
            raise NotImplementedError("the decoder is to be written")

    framework = framework_of(lambda: KerasTask(Unfinished(), train=numbers()), alone())
    with pytest.raises(NotImplementedError, match="the decoder is to be written"):
        framework.predict(numbers(5))


def test_the_classes_of_optimizers_are_as_before_after_an_interception():
    before = [vars(cls).get("apply") for cls in keras.optimizers.SGD.__mro__]
    seen = []
    with pytest.raises(ZeroDivisionError), intercepted(lambda *arguments: seen.append(arguments)):
        keras.optimizers.SGD().apply_gradients([(1, 2)])
        _ = 1 / 0
    assert len(seen) == 1
    assert [vars(cls).get("apply") for cls in keras.optimizers.SGD.__mro__] == before


# What cannot be exchanged.


class Conditional(Late):
    def update(self, loss: Any, tape: tf.GradientTape) -> None:
        tf.cond(loss > 0, lambda: super(Conditional, self).update(loss, tape), lambda: None)


class Elsewhere(Late):
    def update(self, loss: Any, tape: tf.GradientTape) -> None:
        HIDDEN[0].apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)


class NoUpdate(Late):
    def update(self, loss: Any, tape: tf.GradientTape) -> None:
        """Forgotten."""


class Unrelated(Late):
    def update(self, loss: Any, tape: tf.GradientTape) -> None:
        self.optimizers[0].apply(tape.gradient(ops.ones(()), self.trainable_weights), self.trainable_weights)


class NoReturn(Late):
    def train_step(self, data: Any) -> Any:
        super().train_step(data)


class Rows(Late):
    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        return {"loss": data[1]}


class Swapped(Late):
    def train_step(self, data: Any) -> Any:
        y, x = data
        return super().train_step((x, y))


HIDDEN = [keras.optimizers.SGD(0.1)]
REFUSED = {
    Conditional: r"optimizers.0 inside tf.cond or tf.while_loop",
    Elsewhere: r"by the SGD '\w+', which is not an attribute of the model",
    NoUpdate: "applies no gradients by an optimizer",
    Unrelated: "gives optimizers.0 no gradient at all",
    NoReturn: "train_step of the model returned None",
    Rows: r"returned 'loss' of shape \[None\]",
    Swapped: r"(?s)train_step of the model fails .*keras_own_steps.py:\d+: `.*x \[None, 4\], y \[None\]",
}


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_steps_that_cannot_be_exchanged_are_refused_by_name(model):
    with pytest.raises(UserError, match=REFUSED[model]):
        framework_of(lambda: KerasTask(model(), train=numbers()), alone())


SETTINGS: dict[str, dict[str, Any]] = {
    "train.accumulate: 2": {"accumulate": 2},
    "train.clip_norm: 1.0": {"clip_norm": 1.0},
    "train.precision: fp16": {"precision": "fp16"},
    "train.compile": {"compile": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_the_step_would_ignore_are_refused_by_name(name):
    with pytest.raises(UserError, match=f"{name} does not work with the train_step of GAN"):
        framework_of(gan_task, alone(), **SETTINGS[name])


def test_tasks_that_say_too_much_or_too_little_are_refused_by_name():
    def changed(**fields):
        return lambda: dataclasses.replace(gan_task(), **fields)

    with pytest.raises(UserError, match="does not use optimizer= of the task"):
        framework_of(changed(optimizer=keras.optimizers.SGD(0.1)), alone())
    with pytest.raises(UserError, match="nothing says how to evaluate"):
        framework_of(changed(validation=keras_own_steps.gan_data()), alone())
    with pytest.raises(UserError, match="metrics= of the task does not work with"):
        framework_of(lambda: dataclasses.replace(vae_task(), metrics={"a": lambda outputs, batch: 0.0}), alone())
    with pytest.raises(UserError, match="LossScaleOptimizer"):
        wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        framework_of(lambda: gan_task(g_optimizer=wrapped), alone())

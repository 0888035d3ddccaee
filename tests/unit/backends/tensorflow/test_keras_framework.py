"""Keras models in one process: updates against the exact computation, state, precision, errors."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hpctrain.backends.keras.keras_model import lacks_weights, named_variables
from hpctrain.backends.named_state import BLOCK_BYTES, load_tensors
from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.backends.tensorflow.keras_reducer import HostReducer
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.state.keras_tensors import VariableTensor
from hpctrain.backends.tensorflow.state.weights import build_weights
from hpctrain.backends.update import INITIAL, LossScale, UpdateRule, decided
from hpctrain.comm.world import World, alone
from hpctrain.errors import RunFailed, UserError
from hpctrain.reduce.flat_layout import SLOTS, SQUARE, read_slots
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import NonFiniteLoss
from hpctrain.train.state import Placement
from hpctrain.train.stateful import value_of
from tests.tasks.tensorflow_tasks import (
    GLOBAL_BATCH,
    accuracy,
    cut,
    global_batches,
    make_framework,
    mean_loss,
    noisy_model,
    plain_model,
    samples,
    train,
    weighted_loss,
)


def gradients_of(model: keras.Model, loss: Any, batch: dict[str, Any]) -> list[np.ndarray]:
    """The exact gradients of the global batch, by none of our code."""
    with tf.GradientTape() as tape:
        value = loss(model(batch["x"], training=True), batch)
        value = value[0] / value[1] if isinstance(value, tuple) else value
    return [gradient.numpy() for gradient in tape.gradient(value, [v.value for v in model.trainable_variables])]


def first_update(**settings: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients that the optimizer gets in the first update (plain SGD at rate 1), and the exact ones."""
    framework = make_framework(alone(), **settings)
    model, loss = framework.task.model, framework.task.loss
    batch = next(global_batches(1))
    exact = gradients_of(model, loss, batch)
    before = [variable.numpy() for variable in model.trainable_variables]
    framework.program.optimizer_step.optimizer = keras.optimizers.SGD(1.0)
    framework.program.optimizer_step.optimizer.build(model.trainable_variables)
    framework.step(cut(batch, 0, 1, settings.get("accumulate", 1)), len(batch["x"]))
    after = [variable.numpy() for variable in model.trainable_variables]
    return [old - new for old, new in zip(before, after, strict=True)], exact


def branching(value: Any) -> Any:
    """Twice a scalar, where Python's own ``for`` and ``if`` depend on tensors."""
    total = value - value
    for _ in tf.range(tf.constant(2)):
        total += value
    if total < 2.5 * value:
        return total
    else:  # AutoGraph takes this form
        return -total


def branching_loss(outputs: Any, batch: Any) -> Any:
    """Twice the mean loss."""
    return branching(mean_loss(outputs, batch))


def branching_metric(outputs: Any, batch: Any) -> Any:
    """Twice the accuracy."""
    return branching(accuracy(outputs, batch))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 4},
        {"loss": weighted_loss},
        {"loss": weighted_loss, "accumulate": 3},
        {"compile": True},
        {"loss": branching_loss},
    ],
    ids=["mean", "accumulated", "weighted", "weighted-accumulated", "xla", "branches"],
)
def test_an_update_uses_the_gradient_of_the_global_mean(settings):
    used, exact = first_update(**settings)
    for got, wanted in zip(used, exact, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-7)


def test_clipping_scales_the_whole_gradient_to_the_norm():
    used, exact = first_update(clip_norm=0.1)
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in exact))
    assert norm > 0.1
    for got, wanted in zip(used, exact, strict=True):
        np.testing.assert_allclose(got, wanted * 0.1 / norm, rtol=1e-4, atol=2e-7)


def test_half_precision_scales_the_loss_and_gets_the_same_gradient_to_its_rounding():
    for precision in ("fp16", "bf16"):
        used, exact = first_update(precision=precision)
        for got, wanted in zip(used, exact, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0.2, atol=5e-3)


def test_penalties_of_layers_are_part_of_the_loss():
    def model():
        return keras.Sequential([keras.Input((12,)), layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5))])

    def with_penalty(outputs, batch):
        return mean_loss(outputs, batch)

    framework = make_framework(alone(), model=model, loss=with_penalty)
    batch = next(global_batches(1))
    kernel = framework.task.model.trainable_variables[0].numpy()
    total, weight = framework.evaluate(batch)["loss"]
    bare = float(mean_loss(framework.task.model(batch["x"]), batch))
    assert total / weight == pytest.approx(bare + 0.5 * float((kernel**2).sum()), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.5}], ids=["plain", "ema"])
def test_penalties_of_activities_are_part_of_every_loss(settings):
    def model():
        return keras.Sequential([keras.Input((12,)), layers.ActivityRegularization(l2=0.5), layers.Dense(3)])

    framework = make_framework(alone(), model=model, **settings)
    batch = next(global_batches(1))
    bare = float(mean_loss(framework.task.model(batch["x"]), batch))
    penalty = 0.5 * float((batch["x"] ** 2).sum()) / len(batch["x"])
    for _ in range(2):
        total, weight = framework.evaluate(batch)["loss"]
        assert total / weight == pytest.approx(bare + penalty, rel=1e-4)
    train(framework, 2)
    framework.evaluate(batch)
    framework.step([{**batch, "more": batch["x"]}], len(batch["x"]))  # traced anew


def test_layers_inside_any_forward_know_whether_they_train():
    seen = []

    class Probe(layers.Layer):
        def call(self, inputs, training=None):
            seen.append(training)
            return inputs

    class Whole(keras.Model):
        def __init__(self):
            super().__init__()
            self.probe, self.dense = Probe(), layers.Dense(3)
            self.build((None, 12))

        def build(self, shape):
            self.dense.build(shape)
            super().build(shape)

        def call(self, inputs):
            return self.dense(self.probe(inputs))

    framework = make_framework(alone(), model=Whole)
    batch = next(global_batches(1))
    framework.step([batch], 30)
    framework.evaluate(batch)
    assert seen[0] is True and seen[-1] is False


def test_gradients_whose_shape_is_not_known_in_advance_are_exchanged():
    def model():
        return keras.Sequential(
            [keras.Input((12,)), layers.Reshape((3, 4)), layers.Dense(5), layers.Flatten(), layers.Dense(3)]
        )

    used, exact = first_update(model=model)
    for got, wanted in zip(used, exact, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-7)


class Subclassed(keras.Model):
    """Makes its weights at the first call, one of its layers in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.only_in_training, self.head = layers.Dense(8), layers.Dense(8), layers.Dense(3)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        hidden = self.inner(inputs)
        return self.head(self.only_in_training(hidden) if training else hidden)


@pytest.mark.parametrize("is_built", [False, True], ids=["new", "after-build"])
@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called on layer:UserWarning")
def test_a_dry_call_makes_the_weights_of_subclassed_models(is_built):
    def model():
        found = Subclassed()
        if is_built:
            found.build((None, 12))  # marks it as built, and makes no weights
        return found

    begin_task(7)
    judge = layers.Dense(1)
    metrics = {"judged": lambda outputs, batch: judge(outputs)[0, 0]}
    task = KerasTask(model(), mean_loss, keras.optimizers.Adam(1e-2), None, metrics=metrics)
    assert lacks_weights(task.model)
    build_weights(task, samples())
    assert not lacks_weights(task.model) and judge.built
    assert {variable.path for variable in task.model.variables} == {
        f"subclassed/{layer}/{weight}" for layer in ("dense_1", "dense_2", "dense_3") for weight in ("kernel", "bias")
    }
    losses = train(make_framework(alone(), model=lambda: task.model, loss=mean_loss), 21)
    assert np.mean(losses[-7:]) < 0.8 * np.mean(losses[:7])


def test_weights_that_come_too_late_are_refused_by_name():
    class Late(Subclassed):
        def build(self, shape):
            self.inner.build(shape)

    with pytest.raises(UserError, match=r"made the weight late/dense_\d/kernel in its first training step"):
        train(make_framework(alone(), model=lambda: built(Late())), 1)


def built(model: keras.Model) -> keras.Model:
    """With the weights of its own ``build``."""
    model.build((None, 12))
    return model


def test_batches_of_other_sizes_are_not_traced_anew():
    framework = make_framework(alone())
    train(framework, 14)  # two epochs with a smaller last batch
    assert len(framework.program.passes.gradients.by_structure) == 1
    assert framework.program.passes.gradients.function.experimental_get_tracing_count() == 1
    assert framework.program.optimizer_step.run.experimental_get_tracing_count() == 1


def test_an_empty_part_contributes_nothing():
    framework = make_framework(alone())
    before = framework.weights_hash()
    result = framework.step([], 3)
    assert result.sums()["loss"] == (0.0, 0.0)
    assert framework.weights_hash() == before  # Adam's first step over zero gradients


@pytest.mark.parametrize("settings", [{"ema_decay": 0.9}, {"precision": "fp16"}], ids=["ema", "fp16"])
def test_a_run_goes_on_from_its_state_bit_for_bit(settings):
    through = make_framework(alone(), model=noisy_model, **settings)
    train(through, 5)
    saved = {}
    for tensor in through.state():
        saved[tensor.name] = np.empty(tensor.shape, "uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
        tensor.copy_into(saved[tensor.name])
    losses = train(through, 6, skip=5)
    resumed = make_framework(alone(), model=noisy_model, **settings)
    resumed.load(saved)
    assert train(resumed, 6, skip=5) == losses
    assert resumed.weights_hash() == through.weights_hash()
    assert resumed.evaluate(samples()) == through.evaluate(samples())


def test_names_tell_what_a_tensor_is_and_whose():
    framework = make_framework(alone(), model=noisy_model, ema_decay=0.9)
    placements = {tensor.name: tensor.placement for tensor in framework.state()}
    assert placements["model/dense/kernel"] is Placement.REPLICATED
    assert placements["optimizer/momentum/dense/kernel"] is Placement.REPLICATED
    assert placements["ema/dense_1/bias"] is Placement.REPLICATED
    assert placements["model/batch_normalization/moving_mean"] is Placement.RANK
    assert placements["rng/tensorflow"] is Placement.RANK
    trained = {tensor.name for tensor in framework.state() if tensor.is_trained}
    assert len(trained) == 6 and {"model/dense/kernel", "model/batch_normalization/gamma"} < trained
    again = make_framework(alone(), model=noisy_model, ema_decay=0.9)
    assert [tensor.name for tensor in again.state()] == list(placements)


def test_parts_of_a_tensor_can_be_copied_by_rows():
    framework = make_framework(alone())
    tensor = framework.state()[0]
    whole, part = np.empty(tensor.shape, np.float32), np.empty((3, 31), np.float32)
    tensor.copy_into(whole)
    tensor.copy_into(part, (5, 0))
    np.testing.assert_array_equal(part, whole[5:8])


@pytest.mark.parametrize(("first", "what"), [(True, "frozen"), (False, "thawed")])
def test_a_layer_that_is_switched_during_training_is_refused(first, what):
    def model():
        made = plain_model()
        made.layers[0].trainable = first
        return made

    framework = make_framework(alone(), model=model)
    train(framework, 1)
    framework.task.model.layers[0].trainable = not first
    with pytest.raises(UserError, match=f"dense/kernel was {what}"):
        train(framework, 1)


def test_some_of_the_weights_in_a_row_are_read_and_replaced():
    framework = make_framework(alone())
    row = framework.weights()
    for at in (slice(0, len(row)), slice(3, 400), slice(len(row) - 5, len(row))):
        np.testing.assert_array_equal(framework.weights(at), row[at])
        row[at] *= -2
        framework.set_weights(row[at], at)
        np.testing.assert_array_equal(framework.weights(), row)


class Empty(layers.Layer):
    """With weights that have no elements."""

    def build(self, shape: Any) -> None:
        self.none = self.add_weight(shape=(0, shape[-1]), name="none")
        self.vector = self.add_weight(shape=(0,), name="vector")

    def call(self, x: Any) -> Any:
        return x + keras.ops.sum(self.none) + keras.ops.sum(self.vector)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1, "ema_decay": 0.5}, {"accumulate": 2}])
def test_weights_without_elements_change_nothing(settings):
    def model(empty):
        more = [Empty()] if empty else []
        return keras.Sequential([keras.Input((12,)), layers.Dense(31), *more, layers.Dense(3)])

    trained = []
    for empty in (False, True):
        framework = make_framework(alone(), model=lambda empty=empty: model(empty), **settings)
        train(framework, 3, settings.get("accumulate", 1))
        framework.load(saved := {one.name: value_of(one) for one in framework.state()})
        trained.append([value for value in saved.values() if value.size])
    for mine, plain in zip(*trained, strict=True):
        np.testing.assert_array_equal(mine, plain)


def test_frozen_weights_are_replicated_and_stay():
    def model():
        made = plain_model()
        made.layers[0].trainable = False
        return made

    framework = make_framework(alone(), model=model)
    tensors = {tensor.name: tensor for tensor in framework.state()}
    frozen = tensors["model/dense/kernel"]
    assert frozen.placement is Placement.REPLICATED
    before, after = np.empty(frozen.shape, np.float32), np.empty(frozen.shape, np.float32)
    frozen.copy_into(before)
    train(framework, 2)
    frozen.copy_into(after)
    np.testing.assert_array_equal(before, after)


def test_a_large_weight_that_was_loaded_is_read_without_a_copy():
    """TensorFlow copies a variable at every read, for good, once a slice of it was assigned."""
    variable = tf.Variable(tf.zeros((3, BLOCK_BYTES // 8)))  # in three blocks
    values = np.random.default_rng(1).random(variable.shape, dtype=np.float32)
    load_tensors([VariableTensor("model/kernel", variable)], {"model/kernel": values})
    first, second = np.asarray(variable.read_value()), np.asarray(variable.read_value())
    np.testing.assert_array_equal(first, values)
    assert np.shares_memory(first, second)
    assert variable.shape == values.shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (5,), (4, 3)])
def test_values_of_any_type_and_shape_are_loaded(dtype, shape):
    words = np.random.default_rng(2).integers(0, 2, shape)
    variable = tf.Variable(tf.zeros(shape, dtype))
    saved = VariableTensor("model/x", tf.Variable(tf.cast(words, dtype)))
    load_tensors([VariableTensor("model/x", variable)], {"model/x": np.array(saved.host_view())})
    np.testing.assert_array_equal(tf.cast(variable, tf.int64).numpy(), words)


def test_loading_names_what_does_not_fit_and_changes_nothing():
    framework = make_framework(alone())
    before = framework.weights_hash()
    arrays = {}
    for tensor in framework.state():
        arrays[tensor.name] = np.zeros(tensor.shape, tensor.dtype)
    with pytest.raises(UserError, match="model/dense/kernel is missing"):
        framework.load({name: array for name, array in arrays.items() if name != "model/dense/kernel"})
    with pytest.raises(UserError, match=r"model/dense_1/bias has shape \[16\] here and \[2\]"):
        framework.load(arrays | {"model/dense_1/bias": np.zeros(2, np.float32)})
    assert framework.weights_hash() == before


def test_the_average_of_the_weights_is_what_is_evaluated():
    framework = make_framework(alone(), ema_decay=0.5)
    model = framework.task.model
    averages = [variable.numpy() for variable in model.trainable_variables]
    for batch in global_batches(3):
        framework.step([batch], len(batch["x"]))
        averages = [0.5 * old + 0.5 * v.numpy() for old, v in zip(averages, model.trainable_variables, strict=True)]
    batch = samples()
    other = plain_model()
    other.set_weights(averages)
    wanted = float(mean_loss(other(batch["x"]), batch))
    total, weight = framework.evaluate(batch)["loss"]
    assert total / weight == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(framework.predict(batch)["output"], other(batch["x"]).numpy(), rtol=1e-4, atol=1e-5)
    assert abs(float(mean_loss(model(batch["x"]), batch)) - wanted) > 1e-3


def test_metrics_may_branch_by_tensors():
    metrics = {"twice": branching_metric, "accuracy": accuracy}
    found = make_framework(alone(), metrics=metrics).evaluate(next(global_batches(1)))
    assert found["twice"][0] == pytest.approx(2 * found["accuracy"][0])


def test_metrics_are_sums_over_samples():
    framework = make_framework(alone())
    batch = samples()
    found = framework.evaluate(batch)
    assert found["accuracy"] == pytest.approx((float(accuracy(framework.task.model(batch["x"]), batch)) * 183, 183))


def test_a_loss_that_is_not_finite_stops_before_it_reaches_the_weights():
    framework = make_framework(alone())
    before = framework.weights_hash()
    batch = next(global_batches(1))
    batch["x"] = batch["x"].copy()
    batch["x"][3, 4] = np.nan
    with pytest.raises(NonFiniteLoss) as caught:
        framework.step([batch], 30)
    assert caught.value.ranks == [0]
    assert framework.weights_hash() == before


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale():
    framework = make_framework(alone(), precision="fp16")
    assert framework.source.loss_scale is not None
    framework.source.loss_scale.state[0] = 2.0**40
    before = framework.weights_hash()
    batch = next(global_batches(1))
    framework.step([batch], 30)
    assert framework.weights_hash() == before
    assert framework.source.loss_scale.factor == 2.0**39


def test_the_learning_rate_is_a_multiple_of_the_optimizers_own():
    framework = make_framework(alone())
    framework.set_learning_rate(0.5)
    assert float(framework.task.optimizer.learning_rate) == pytest.approx(5e-3)
    framework.set_learning_rate(2.0)
    assert float(framework.task.optimizer.learning_rate) == pytest.approx(2e-2)
    assert framework.facts.learning_rate == pytest.approx(2e-2)


def test_a_keras_schedule_stays_where_the_run_file_has_none():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    framework = make_framework(alone(), optimizer=lambda: keras.optimizers.SGD(schedule))
    train(framework, 2)
    assert float(framework.task.optimizer.learning_rate) == pytest.approx(0.025)
    with pytest.raises(UserError, match="both the run file's schedule and the Keras optimizer's own"):
        framework.set_learning_rate(0.5)


def refusal(**changed: Any) -> str:
    with pytest.raises(UserError) as caught:
        make_framework(alone(), **changed)
    return caught.value.what


def made_for(policy: str) -> keras.Model:
    """A model that ignores the precision that the run asks for."""
    keras.config.set_dtype_policy(policy)
    try:
        return plain_model()
    finally:
        keras.config.set_dtype_policy("float32")


def frozen_model() -> keras.Model:
    """Of which nothing is trained."""
    model = plain_model()
    model.trainable = False
    return model


def test_what_cannot_work_is_refused_with_a_reason():
    assert "no weights yet" in refusal(model=lambda: keras.Sequential([layers.Dense(3)]))
    assert "no weight to train" in refusal(model=frozen_model)
    assert "reduce.overlap is on, which is for PyTorch" in refusal(reduce={"overlap": "on"})
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    assert "is a LossScaleOptimizer" in refusal(optimizer=lambda: scaled)
    # apply divides gradients by it, but only Keras' own train_step multiplies the loss
    assert "has a loss_scale_factor" in refusal(optimizer=lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    assert "no layer of the Keras model computes in it" in refusal(model=lambda: made_for("float32"), precision="bf16")
    assert "Keras model is mixed_float16, and train.precision is fp32" in refusal(
        model=lambda: made_for("mixed_float16")
    )
    assert "which is for PyTorch" in refusal(recompute=("*",))


def test_an_error_of_an_exchange_is_raised_and_not_tensorflows_about_it():
    """Its sentence and code were lost in an UnknownError with the graph's trace."""

    class Waiting:
        dtype = tf.float32.as_numpy_dtype

        def sum(self, *pieces):
            raise RunFailed("waited 900 s for the other ranks", "look at their logs")

        def close(self): ...

    framework, batch = make_framework(alone()), next(global_batches(1))
    reducer: Any = HostReducer("mpi", Waiting(), joined=False)
    framework.program.reducers.chosen = lambda rehearse: reducer  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="waited 900 s"):
        framework.step([batch], len(batch["x"]))


def test_ranks_that_would_all_train_on_the_first_gpu_are_refused(monkeypatch):
    class Two(World):
        local_size = 2

    def devices(kind):
        return [f"{kind}:0", f"{kind}:1"]

    monkeypatch.setattr(tf.config, "list_logical_devices", devices)
    with pytest.raises(UserError, match="before this rank could choose one of the 2 GPUs"):
        make_framework(Two(**vars(alone())))


def test_a_loss_per_sample_is_refused():
    framework = make_framework(alone(), loss=lambda outputs, batch: tf.reduce_sum(outputs, 1))
    with pytest.raises(UserError, match="returned a tensor of shape"):
        framework.step(cut(next(global_batches(1)), 0, 1), 30)


def test_sparse_gradients_are_made_dense_or_refused():
    def model():
        whole = keras.Input((12,))
        words = layers.Embedding(4, 3)(keras.ops.cast(whole > 0, "int32"))
        return keras.Model(whole, keras.ops.sum(words, 1))

    train(make_framework(alone(), model=model), 2)
    framework: KerasFramework = make_framework(alone(), model=model, reduce={"sparse": "refuse"})
    with pytest.raises(UserError, match="is sparse"):
        train(framework, 1)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_an_update_decides_as_the_rule_says(clip_norm):
    random, odd = np.random.default_rng(3), [0.0, 1.0, np.nan, np.inf, 1e-30, 1e30]
    for _ in range(300):
        slots = random.lognormal(0, 8, SLOTS).astype(np.float32)
        slots[random.integers(0, 4, 2)] = random.choice(odd, 2)
        exact = tf.constant(slots, tf.float64)
        norm = tf.sqrt(exact[SQUARE])
        factor, finite = decided(exact, norm, tf.constant(INITIAL, tf.float64), clip_norm, tf.where, tf.math.is_finite)
        rule = UpdateRule(clip_norm, LossScale())
        expected = rule.decide(read_slots(slots.tolist()), float(slots[SQUARE]) ** 0.5).factor
        assert (float(factor) if finite else None) == expected, slots


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_rank_knows_when_its_backward_pass_ended(accumulate):
    framework = make_framework(alone(), model=plain_model)
    clock = framework.program.clock
    assert isinstance(clock, IntervalClock)
    parts = cut(next(global_batches(1)), 0, 1, accumulate)
    framework.step(parts, GLOBAL_BATCH)
    clock.take()
    shares = []
    for _ in range(20):
        begin = time.perf_counter()
        framework.step(parts, GLOBAL_BATCH)
        all_s, seconds = time.perf_counter() - begin, clock.take()
        shares.append([share / all_s for share in (seconds["backward"], seconds["optimizer"], sum(seconds.values()))])
    backward, optimizer, all_phases = np.median(shares, axis=0)
    assert backward > 0.01, "part of an update; 0 if its end is not marked"
    assert optimizer > 0.01, "the other part"
    assert all_phases == pytest.approx(1, rel=0.2)


def test_states_of_stateful_recurrent_layers_are_part_of_the_state():
    """A resumed run began with zeros: Keras does not count them among a model's variables."""
    lstm = keras.layers.Bidirectional(keras.layers.LSTM(3, stateful=True))
    model = keras.Sequential([keras.Input((5, 1), batch_size=4), lstm, keras.layers.Dense(1)])
    before = {name: one.numpy().copy() for name, one, _ in named_variables(model) if "rnn_state" in name}
    model(np.ones((4, 5, 1), np.float32))
    after = {name: one.numpy().copy() for name, one, _ in named_variables(model) if "rnn_state" in name}
    assert list(after) == [f"model/rnn_state/{index}" for index in range(4)]
    assert all(one.any() and not before[name].any() for name, one in after.items())

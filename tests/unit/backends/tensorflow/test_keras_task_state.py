"""State outside of a Keras model is saved and there again after a resume, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.train.state import Placement
from tests.support.choices import Rehearsed
from tests.tasks.tensorflow_tasks import make_framework, mean_loss, samples, train

Batch = Mapping[str, tf.Tensor]


def saved(framework: KerasFramework) -> dict[str, np.ndarray]:
    arrays = {}
    for tensor in framework.state():
        arrays[tensor.name] = np.empty(tensor.shape, tensor.dtype)
        tensor.copy_into(arrays[tensor.name])
    return arrays


def resumes(make: Callable[[], KerasFramework]) -> set[str]:
    """Whether 5 + 5 updates are 10; the names of what was saved."""
    first = make()
    train(first, 5)
    arrays = saved(first)
    straight = train(first, 5)
    second = make()
    second.load(arrays)
    assert train(second, 5) == straight
    assert first.weights_hash() == second.weights_hash()
    return set(arrays)


class Halves(keras.optimizers.Optimizer):
    """Two optimizers with equal slots, each of some of the weights."""

    def __init__(self, first: Any, second: Any, eager: bool = True) -> None:
        super().__init__(learning_rate=0.1)
        self.inner = {"first": first, "second": second}
        self.eager = eager

    def parts(self, values: list[Any]) -> list[tuple[Any, list[Any]]]:
        return [(self.inner["first"], values[::2]), (self.inner["second"], values[1::2])]

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        for optimizer, own in self.parts(variables):
            if self.eager:
                optimizer.build(own)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for (optimizer, own), (_, variables) in zip(
            self.parts(list(grads)), self.parts(list(trainable_variables)), strict=True
        ):
            optimizer.apply(own, variables)


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def test_an_optimizer_that_wraps_two_resumes():
    names = resumes(lambda: make_framework(alone(), optimizer=lambda: Halves(momentum(), momentum())))
    slots = {name.split("/")[1] for name in names if name.startswith("optimizer/") and name.count("/") > 2}
    assert slots == {"inner.first.momentum", "inner.second.momentum"}


def test_the_schedule_reaches_optimizers_that_are_wrapped():
    framework = make_framework(alone(), optimizer=lambda: Halves(momentum(), keras.optimizers.Adam(0.02)))
    framework.set_learning_rate(0.5)
    rates = [float(one.learning_rate) for one in framework.task.optimizer.inner.values()]
    assert rates == pytest.approx([0.025, 0.01])


def test_an_optimizer_that_makes_its_state_in_the_first_update_is_refused_by_name():
    framework = make_framework(alone(), optimizer=lambda: Halves(momentum(), momentum(), eager=False))
    framework.state()
    train(framework, 1)
    with pytest.raises(
        UserError, match=r"the variable optimizer/inner\.\w+\.momentum/\S+ was made by the first update"
    ):
        framework.state()


class Annealed(keras.losses.Loss):
    """Counts in a variable of Keras and in one of TensorFlow, and has a layer with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = keras.Variable(0, dtype="int32", trainable=False)
        self.mean = [tf.Variable(0.0)]
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.norm.build((None, 3))

    def __call__(self, outputs: Any, batch: Any) -> Any:
        loss = mean_loss(self.norm(outputs, training=True), batch)
        self.calls.assign_add(1)
        self.mean[0].assign(0.9 * self.mean[0] + 0.1 * loss)
        frozen = self.norm(outputs, training=False)
        return loss + mean_loss(frozen, batch) / tf.cast(self.calls.value, tf.float32) + self.mean[0]


def closure() -> Callable[..., Any]:
    inner = Annealed()

    def loss(outputs: Any, batch: Batch) -> Any:
        return inner(outputs, batch)

    return loss


LOSSES: dict[str, Callable[[], Any]] = {
    "loss": Annealed,
    "closure": closure,
    "partial": lambda: functools.partial(lambda inner, outputs, batch: inner(outputs, batch), Annealed()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_state_resumes(name):
    names = resumes(lambda: make_framework(alone(), loss=LOSSES[name]()))
    held = {each.rpartition(".")[2] for each in names if each.startswith("held/loss/")}
    assert held >= {"gamma", "moving_mean"}
    assert len([each for each in names if each.startswith("held/loss/")]) == 6


def noisy() -> Callable[..., Any]:
    """Draws from generators of the task's own."""
    ours, seeds = tf.random.Generator.from_seed(1), keras.random.SeedGenerator(2)

    def loss(outputs: Any, batch: Batch) -> Any:
        return mean_loss(outputs, batch) * (1 + ours.uniform(()) + keras.random.uniform((), seed=seeds))

    return loss


def test_generators_of_the_tasks_own_resume_and_begin_other_streams_at_another_number_of_ranks():
    names = resumes(lambda: make_framework(alone(), loss=noisy()))
    assert {"rng/held/loss/ours.state", "rng/held/loss/seeds.state"} < names
    framework = make_framework(alone(), loss=noisy())
    drawn = []
    for step in (0, 5, 6):
        framework.reseed(step)
        drawn.append({name: each.tobytes() for name, each in saved(framework).items() if name.startswith("rng/held/")})
    assert all(len({one[name] for one in drawn}) == 3 for name in drawn[0])


def test_weights_of_layers_in_a_loss_are_shared_and_what_it_counts_is_not():
    placement = {tensor.name: tensor.placement for tensor in make_framework(alone(), loss=Annealed()).state()}
    assert placement["held/loss/norm.0.gamma"] is Placement.REPLICATED
    assert placement["held/loss/norm.2.moving_mean"] is Placement.RANK
    assert placement["held/loss/calls"] is placement["held/loss/mean.0"] is Placement.RANK


def test_a_state_that_has_no_place_any_more_is_told():
    arrays = saved(make_framework(alone(), loss=Annealed()))
    with pytest.raises(UserError, match="held/loss/calls was saved, and the task has no place for it"):
        make_framework(alone()).load(arrays)


def test_rehearsals_leave_the_state_of_a_loss_as_it_was():
    wanted = train(make_framework(alone(), loss=Annealed()), 3)
    assert train(make_framework(alone(), loss=Annealed(), choice=Rehearsed), 3) == wanted


class Declared:
    """A loss that grows with each call, by a variable that it declares as its state."""

    def __init__(self) -> None:
        self.calls = tf.Variable(1.0)

    def __call__(self, outputs: tf.Tensor, batch: Batch) -> tf.Tensor:
        self.calls.assign_add(1.0)
        return mean_loss(outputs, batch) * self.calls

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "half": tf.constant([1.5], tf.bfloat16)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        assert saved["half"].dtype == tf.bfloat16 and saved["half"].numpy().tolist() == [1.5]
        self.calls.assign(saved["calls"])


def test_declared_state_has_one_name_and_rehearsals_and_the_dry_call_leave_it():
    declared = Declared()
    framework = make_framework(alone(), loss=declared, state={"calls": declared}, choice=Rehearsed)
    assert not [tensor.name for tensor in framework.state() if tensor.name.startswith("held/")]
    framework.dry_call({name: array[:4] for name, array in samples().items()})
    assert float(declared.calls) == 1
    assert train(framework, 3) == train(make_framework(alone(), loss=Declared()), 3)
    assert float(declared.calls) == 4


def test_streams_of_random_numbers_are_others_after_each_change_of_the_number_of_ranks():
    model = lambda: keras.Sequential([keras.Input((12,)), layers.Dropout(0.5), layers.Dense(3)])  # noqa: E731
    framework = make_framework(alone(), model=model)
    states = []
    for step in (0, 0, 7, 8):
        framework.reseed(step)
        states.append({name: array.tobytes() for name, array in saved(framework).items() if name.startswith("rng/")})
    assert {"rng/tensorflow", "rng/numpy", "rng/python"} < states[0].keys() and len(states[0]) == 6
    assert states[0] == states[1]
    for name in states[0].keys() - {"rng/numpy_spare", "rng/python_spare"}:
        assert len({state[name] for state in states}) == 3, name

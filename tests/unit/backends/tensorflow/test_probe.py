"""What small copies of a Keras optimizer tell of how its variables may be shared out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.state.tensors import slots_of
from hpctrain.backends.tensorflow.strategies.probe import VECTOR, cuts_of, even, stand_in, try_optimizer
from tests.tasks import tensorflow_sharded as sharded


def plain_model() -> keras.Model:
    """In float32, of layers that differ in nothing but their numbers."""
    return keras.Sequential([keras.Input((9,)), *(layers.Dense(9) for _ in range(4))])


@pytest.mark.parametrize("name", sharded.BY_ROWS)
def test_rows_may_be_cut_of_all_that_is_not_bounded(name: str) -> None:
    variables = sharded.model().trainable_variables
    verdict = try_optimizer(sharded.BY_ROWS[name](), variables)
    assert verdict.is_alone
    assert verdict.by_rows == tuple(one.constraint is None for one in variables)
    assert sum(verdict.by_rows) == len(variables) - 1


@pytest.mark.parametrize("name", sharded.WHOLE)
def test_others_need_whole_variables(name: str) -> None:
    verdict = try_optimizer(sharded.WHOLE[name](), sharded.model().trainable_variables)
    assert verdict.is_alone and not any(verdict.by_rows)


def test_what_an_optimizer_chooses_by_names_is_seen() -> None:
    """Muon treats matrices as a whole, except those that it is told to leave to Adam."""
    variables = plain_model().trainable_variables
    left = variables[4].path
    verdict = try_optimizer(keras.optimizers.Muon(0.01, exclude_layers=[left.split("/")[-2]]), variables)
    assert verdict.is_alone
    matrices = [pair for pair in zip(variables, verdict.by_rows, strict=True) if len(pair[0].shape) == 2]
    found = {one.path for one, by_rows in matrices if by_rows}
    assert found == {left}


def test_what_depends_on_other_variables_is_not_alone() -> None:
    variables = plain_model().trainable_variables
    for optimizer in (sharded.Coupled(0.1), keras.optimizers.SGD(0.1, global_clipnorm=0.01)):
        assert not try_optimizer(optimizer, variables).is_alone


def test_nothing_is_changed() -> None:
    begin_task(7)
    model, optimizer = plain_model(), keras.optimizers.Nadam(0.1)
    assert keras.Variable(0.0).name == "variable"
    before = [one.numpy().copy() for one in (*model.variables, *optimizer.variables)]
    try_optimizer(optimizer, model.trainable_variables)
    assert not optimizer.built
    assert keras.Variable(0.0).name == "variable_1", "numbers of names go on where they were"
    after = [one.numpy().copy() for one in (*model.variables, *optimizer.variables)]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (70,), (9, 7), (1, 5), (5, 3, 2)])
def test_cuts_fall_between_vectors(shape: tuple[int, ...]) -> None:
    tried = even(shape)
    cuts = cuts_of(tried)
    assert len(tried) == len(shape)
    if shape and shape[0] > 1:
        assert len(cuts) > 1 and cuts[0].start == 0 and cuts[-1].stop == tried[0]
        row = int(np.prod(tried[1:]))
        assert all(cut.start * row % VECTOR == 0 for cut in cuts)
    else:
        assert len(cuts) == 1


def test_variables_that_share_a_name_are_told_by_what_holds_them() -> None:
    variables = plain_model().trainable_variables[:2]
    optimizer: Any = keras.optimizers.Adafactor(0.1)
    optimizer.build(variables)
    flat = [one.path.replace("/", "_") for one in variables]
    found = {(slot, weight): tuple(one.shape) for one, slot, weight in slots_of(optimizer, flat) if weight}
    assert found["velocity", flat[0]] == (9, 9) and found["r", flat[0]] == found["c", flat[0]] == (9,)


def test_a_stand_in_is_called_as_the_weight_is() -> None:
    weight = plain_model().trainable_variables[0]
    part = stand_in(weight, weight.value[2:5])
    assert part.path == weight.path and part.name == weight.name
    assert part.value.name == weight.value.name and tuple(part.shape) == (3, 9)

"""Nested values come back as they were, and their arrays keep their shapes while only numbers change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import UserError
from hpctrain.train.state import Placement
from hpctrain.train.tree import Leaves, put_together, take_apart, tree_tensors

NUMBERS = st.one_of(st.booleans(), st.integers(1 - 2**256, 2**256 - 1), st.floats(allow_nan=False))
LEAVES = st.one_of(st.none(), st.text(max_size=5), NUMBERS)
KEYS = st.one_of(st.text(max_size=5), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def kind(value: Any) -> str | None:
    return "array" if isinstance(value, np.ndarray) else None


def back(value: Any) -> Any:
    tree = take_apart(value, kind, "it")
    return put_together(tree.arrays(), lambda number, what: (what, tree.leaves[number]), "it")


def described(value: Any) -> str:
    """A value with all its types."""
    return repr(value)


@given(VALUES)
def test_values_come_back_with_their_types(value):
    assert described(back(value)) == described(value)


def test_leaves_come_back_with_what_was_said_of_them():
    array = np.arange(3)
    assert back({"a": [array]})["a"][0][0] == "array" and back([array])[0][1] is array


@given(st.lists(st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats()), min_size=1, max_size=5))
def test_shapes_do_not_depend_on_numbers(numbers):
    others = [type(number)(1) for number in numbers]
    shapes = [
        {name: array.shape for name, array in take_apart({"x": values}, kind, "it").arrays().items()}
        for values in (numbers, others)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("number", [2**63, 2**200, -(2**64), 2**256 - 1])
def test_the_shape_does_not_depend_on_a_generators_words(number):
    assert len(take_apart(number, kind, "it").arrays()["structure"]) == len('["big","+"]') + 64


@pytest.mark.parametrize("value", [object(), {1.5: 2}, {(1,): 2}, {1, 2}, 2**256, 1j, b"x"])
def test_what_cannot_be_saved_is_named_with_its_place(value):
    with pytest.raises(UserError, match=r"it, a, 1 is an? \w+, which cannot be saved"):
        take_apart({"a": (0, value)}, kind, "it")


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '["list",[["int",null]]]', '["leaf",["0"]]', '["dict",[[[],["int",0]]]]']
)
def test_a_forged_structure_is_refused(text):
    arrays = {"structure": np.frombuffer(text.encode(), np.uint8)}
    with pytest.raises(UserError, match="what was saved of it cannot be restored"):
        put_together(arrays, lambda number, what: None, "it")


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([None]), np.datetime64(0, "s"), np.zeros(1, "f4,f4")])
def test_arrays_of_anything_but_numbers_cannot_be_saved(value):
    """It was an exception of the run, which was tried again."""
    with pytest.raises(UserError, match="which cannot be saved") as refused:
        tree_tensors("it", {"a": value}, Placement.FIRST, Leaves(), "it")
    assert "arrays of numbers" in refused.value.fix

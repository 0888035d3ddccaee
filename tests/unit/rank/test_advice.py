"""Advice on data and buffers that cannot be used says what to write instead."""

import numpy as np
import pytest

from hpctrain.data.formats.sources import open_dataset
from hpctrain.errors import UserError
from hpctrain.system.user_errors import advice_on


class Sparse:
    """Like a scipy matrix: np.asarray makes a single object of it."""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"x": Sparse(), "y": np.zeros(3)}, "of a sparse matrix give .toarray"),
        (
            (row for row in np.zeros((3, 2))),
            "a generator runs only once: make arrays of it, or give hpctrain.open_stream",
        ),
    ],
)
def test_data_of_other_kinds(data, said):
    with pytest.raises(UserError) as refused:
        open_dataset(data)
    assert said in refused.value.fix


def test_complex_inputs_are_not_told_to_become_float32():
    (advice,) = advice_on("mat1 and mat2 must have the same dtype, but got ComplexFloat and Float")
    assert advice.startswith("Complex arrays need complex weights")
    (advice,) = advice_on("mat1 and mat2 must have the same dtype, but got Double and Float")
    assert "array.astype(np.float32)" in advice

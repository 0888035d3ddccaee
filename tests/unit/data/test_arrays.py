"""Arrays in memory as data."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.data.dataset import from_arrays
from hpctrain.errors import UserError


class WithGradient:
    """As a torch tensor that requires a gradient: an array only once it is detached."""

    def detach(self) -> np.ndarray:
        return np.ones((3, 2), np.float32)


def test_gradients_of_data_are_left_out():
    read = from_arrays({"x": WithGradient()}).read(np.arange(3))
    np.testing.assert_array_equal(read["x"], np.ones((3, 2)))


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_numbers_wider_than_any_that_models_compute_in_are_refused(dtype):
    with pytest.raises(UserError, match="wider than any that models compute in"):
        from_arrays({"x": np.ones((3, 2), dtype)})

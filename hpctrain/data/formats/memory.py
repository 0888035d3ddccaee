"""Datasets that are arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Field, Samples, check_field, check_lengths, content_fingerprint


class ArrayDataset:
    """Arrays with a common sample axis. Use ``from_arrays``, which checks them."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], fields: Mapping[str, Field]) -> None:
        self.arrays = arrays
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: NDArray[np.int64]) -> Samples:
        """See Dataset."""
        return {name: array.take(indices, axis=0) for name, array in self.arrays.items()}

    def fingerprint(self) -> str:
        """See Dataset."""
        return content_fingerprint(self)


def from_arrays(arrays: Mapping[str, Any], where: str = "the dict of arrays") -> ArrayDataset:
    """A dataset of array-likes that share their first axis; nothing is copied where they are NumPy arrays already."""
    native = {name: np.asarray(array) for name, array in arrays.items()}
    fields = {name: check_field(name, array.shape, array.dtype, where) for name, array in native.items()}
    check_lengths({name: len(array) for name, array in native.items()}, where)
    return ArrayDataset({name: array.astype(fields[name].dtype, copy=False) for name, array in native.items()}, fields)

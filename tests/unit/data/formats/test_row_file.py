"""Rows written apart are one file."""

import h5py
import numpy as np
import pytest

from hpctrain.data.dataset import Field
from hpctrain.errors import RunFailed
from hpctrain.rank.predictions import RowWriter, create_row_file


def test_rows_of_several_writers_read_back_in_order(tmp_path):
    path = tmp_path / "rows.h5"
    values = {"a": np.arange(35, dtype=np.float32).reshape(7, 5), "b": np.arange(7, dtype=np.int64)}
    create_row_file(path, {name: Field(array.shape[1:], array.dtype) for name, array in values.items()}, 7)
    for begin, end in [(3, 7), (0, 3)]:
        RowWriter.open(path).write(begin, {name: array[begin:end] for name, array in values.items()})
    with h5py.File(path) as file:
        for name, array in values.items():
            assert file[name].dtype == array.dtype
            np.testing.assert_array_equal(file[name][...], array)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(RunFailed, match="cannot be made"):
        create_row_file(tmp_path / "none" / "rows.h5", {"a": Field((), np.dtype("f4"))}, 3)

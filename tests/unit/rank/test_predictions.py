"""Predictions of one rank in a file: whole, or an error that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.pipeline import ValidationData
from hpctrain.errors import UserError
from hpctrain.rank.predictions import write_predictions
from tests.support.fake_framework import FakeFramework

SAMPLES = 10
Outputs = Callable[[NDArray[Any]], NDArray[Any]]


class Model(FakeFramework):
    """Predicts by a function of x."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    def predict(self, batch: Any) -> dict[str, NDArray[Any]]:
        return {"output": self.outputs(batch["x"])}


def predict(outputs: Outputs, path: Path) -> None:
    data = ValidationData(open_dataset({"x": np.arange(float(SAMPLES))}), 4, 0, 1, prefetch=0)
    write_predictions(Model(outputs), data, Group("alone"), path)  # type: ignore[arg-type]


def test_every_sample_has_its_row(tmp_path):
    path = tmp_path / "new" / "predictions.h5"
    predict(lambda x: np.stack([x, -x], axis=1), path)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["output"], np.stack([np.arange(SAMPLES), -np.arange(SAMPLES)], axis=1))


@pytest.mark.parametrize(
    "outputs",
    [
        lambda x: np.zeros((len(x), 4 if x[0] == 0 else 2)),  # padded to the batch's longest
        lambda x: x.astype(np.float32 if x[0] == 0 else np.float64),
        lambda x: np.zeros((3, len(x))),  # another axis first
        lambda x: x.mean(),
    ],
)
def test_outputs_that_are_not_one_row_a_sample_are_refused(outputs, tmp_path):
    with pytest.raises(UserError, match="'output' is float"):
        predict(outputs, tmp_path / "predictions.h5")
    assert not (tmp_path / "predictions.h5").exists()


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        predict(lambda x: x, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        predict(lambda x: x, tmp_path / "file" / "predictions.h5")

"""Regression on the columns of a table with Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hpctrain import KerasTask

COLUMNS = 8


def rows(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Synthetic rows of a table, and a number to predict; replace them with your own.

    May return arrays with a leading sample axis, or the path of an HDF5 file that ``hpctrain data pack`` made from CSV
    or Parquet.
    """
    random = np.random.default_rng(seed)
    columns = random.normal(size=(samples, COLUMNS)).astype(np.float32)
    value = columns[:, 0] * columns[:, 1] + np.sin(columns[:, 2])
    return {"columns": columns, "value": value[:, None]}


def error(output: Any, batch: Any) -> Any:
    """Mean absolute error."""
    return ops.mean(ops.abs(output - batch["value"]))


def task(width: int = 64, lr: float = 3e-3) -> KerasTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    model = keras.Sequential(
        [keras.Input((COLUMNS,)), layers.Dense(width, "relu"), layers.Dense(width, "relu"), layers.Dense(1)]
    )
    return KerasTask(
        model=model,
        loss="mse",  # or a function(output, batch) of your own
        optimizer=keras.optimizers.AdamW(lr),
        train=rows(2000, seed=1),
        validation=rows(400, seed=2),
        metrics={"error": error},
    )

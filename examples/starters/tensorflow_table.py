"""A number from the columns of a table, with Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hpctrain import KerasTask

COLUMNS = 8


def rows(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Made-up rows of a table, and a number to predict; put your own in their place.

    Arrays with a leading sample axis, or a CSV or Parquet file that ``hpctrain data pack`` has made into HDF5.
    """
    random = np.random.default_rng(seed)
    columns = random.normal(size=(samples, COLUMNS)).astype(np.float32)
    value = columns[:, 0] * columns[:, 1] + np.sin(columns[:, 2])
    return {"columns": columns, "value": value[:, None]}


def error(output: Any, batch: Any) -> Any:
    """Mean distance to the right number."""
    return ops.mean(ops.abs(output - batch["value"]))


def task(width: int = 64, lr: float = 3e-3) -> KerasTask:
    """What is trained; ``task_args`` in the run file sets the arguments."""
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

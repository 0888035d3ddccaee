"""Image classification with Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hpctrain import KerasTask

CLASSES = 4


def images(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Synthetic images with a bright spot in one of four corners; replace them with your own.

    May return arrays with a leading sample axis, the path of an HDF5 file made by ``hpctrain data pack``, or a Dataset.
    """
    random = np.random.default_rng(seed)
    label = random.integers(0, CLASSES, samples)
    image = random.normal(0, 0.5, (samples, 16, 16)).astype(np.float32)
    for number, corner in enumerate(label):
        row, column = 8 * (corner // 2), 8 * (corner % 2)
        image[number, row + 2 : row + 6, column + 2 : column + 6] += 1
    return {"image": image[..., None], "label": label}


def accuracy(output: Any, batch: Any) -> Any:
    """Fraction of correct predictions."""
    right = ops.equal(ops.cast(ops.argmax(output, 1), "int64"), ops.cast(batch["label"], "int64"))
    return ops.mean(ops.cast(right, "float32"))


def task(width: int = 8, lr: float = 3e-3) -> KerasTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    model = keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    return KerasTask(
        model=model,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),  # or a function(output, batch) of your own
        optimizer=keras.optimizers.AdamW(lr),
        train=images(2000, seed=1),
        validation=images(400, seed=2),
        metrics={"accuracy": accuracy},
    )

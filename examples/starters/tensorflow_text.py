"""Text classification with Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hpctrain import KerasTask

WORDS = 100


def texts(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Synthetic texts as word ids, one of which decides the class; replace them with your own.

    May return arrays with a leading sample axis (all texts of one length), the path of an HDF5 file made by
    ``hpctrain data pack``, or a Dataset.
    """
    random = np.random.default_rng(seed)
    words = random.integers(2, WORDS, (samples, 24))
    label = random.integers(0, 2, samples)
    words[np.arange(samples), random.integers(0, 24, samples)] = label  # word 0 or word 1, somewhere
    return {"words": words, "label": label}


def accuracy(output: Any, batch: Any) -> Any:
    """Fraction of correct predictions."""
    right = ops.equal(ops.cast(ops.argmax(output, 1), "int64"), ops.cast(batch["label"], "int64"))
    return ops.mean(ops.cast(right, "float32"))


def task(width: int = 16, lr: float = 3e-3) -> KerasTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    model = keras.Sequential(
        [
            keras.Input((24,), dtype="int64"),
            layers.Embedding(WORDS, width),
            layers.GlobalMaxPooling1D(),
            layers.Dense(64, "relu"),
            layers.Dense(2),
        ]
    )
    return KerasTask(
        model=model,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),  # or a function(output, batch) of your own
        optimizer=keras.optimizers.AdamW(lr),
        train=texts(2000, seed=1),
        validation=texts(400, seed=2),
        metrics={"accuracy": accuracy},
    )

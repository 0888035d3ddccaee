"""Classes of texts, with Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hpctrain import KerasTask

WORDS = 100


def texts(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Made-up texts as numbers of words, one of which decides the class; put your own in their place.

    Arrays with a leading sample axis, all texts of one length, an HDF5 file of ``hpctrain data pack``, or a Dataset.
    """
    random = np.random.default_rng(seed)
    words = random.integers(2, WORDS, (samples, 24))
    label = random.integers(0, 2, samples)
    words[np.arange(samples), random.integers(0, 24, samples)] = label  # word 0 or word 1, somewhere
    return {"words": words, "label": label}


def accuracy(output: Any, batch: Any) -> Any:
    """Share of right answers."""
    right = ops.equal(ops.cast(ops.argmax(output, 1), "int64"), ops.cast(batch["label"], "int64"))
    return ops.mean(ops.cast(right, "float32"))


def task(width: int = 16, lr: float = 3e-3) -> KerasTask:
    """What is trained; ``task_args`` in the run file sets the arguments."""
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

"""The network in Keras, as a task for ``hpctrain run``."""

from __future__ import annotations

import keras

from benchmarks.recovery.notes import CLASSES, FEATURES, HIDDEN, Notes, samples
from hpctrain import KerasTask

LOSS = "sparse_categorical_crossentropy"


def task(log: str) -> KerasTask:
    """Makes the task."""
    hidden = [keras.layers.Dense(HIDDEN, activation="relu") for _ in range(2)]
    net = keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES, activation="softmax")])
    return KerasTask(net, LOSS, keras.optimizers.AdamW(), train=samples(), hooks=[Notes(log)])

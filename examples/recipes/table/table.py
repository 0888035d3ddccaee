"""Predicts a yes or no from a table with numbers and categories: one embedding per category, with Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import hpctrain
from hpctrain import KerasTask


def build(numbers: np.ndarray[Any, Any], codes: np.ndarray[Any, Any], width: int) -> keras.Model:
    """A network for columns like these rows: numbers are standardised, codes embedded."""
    number = keras.Input((numbers.shape[1],), name="numbers")
    code = keras.Input((codes.shape[1],), dtype="int32", name="codes")
    parts = [layers.Normalization(mean=numbers.mean(0), variance=numbers.var(0))(number)]
    for column, values in enumerate(codes.max(0) + 1):
        embedding = layers.Embedding(int(values), min(50, 1 + int(values) // 2), name=f"embedding_{column}")
        parts.append(embedding(code[:, column]))
    x = layers.Concatenate()(parts)
    for _ in range(2):
        x = layers.Dropout(0.1)(layers.Dense(width, "relu")(x))
    return keras.Model([number, code], layers.Dense(1)(x))


def task(train: str = "train.h5", validation: str = "validation.h5", width: int = 64, lr: float = 1e-3) -> KerasTask:
    """Build the task."""
    data = hpctrain.open_dataset(train, ("numbers", "codes", "label"))
    first = data.read(np.arange(min(len(data), 100_000)))
    model = build(first["numbers"], first["codes"], width)
    model.compile(optimizer=keras.optimizers.AdamW(lr), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    auc = keras.metrics.AUC(from_logits=True)
    return KerasTask(
        model=model,
        train=data,
        validation=hpctrain.open_dataset(validation, ("numbers", "codes", "label")),
        metrics={"auc": hpctrain.Selected(auc, lambda output, batch: (output, batch["label"]))},
        fit_data=lambda batch: ((batch["numbers"], batch["codes"]), batch["label"]),
    )

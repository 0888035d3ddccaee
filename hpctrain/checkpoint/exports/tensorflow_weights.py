"""Weights of a checkpoint as a Keras ``.weights.h5`` file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
from numpy.typing import NDArray

from hpctrain.frameworks.named_state import load_tensors
from hpctrain.frameworks.tensorflow.state import model_tensors


def export_keras(model: keras.Model, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Writes a file for ``model.load_weights(path)``.

    Args:
        model: built as for training; its weights are overwritten.
        arrays: of a checkpoint, by name (``model/...``).
        path: ends in ``.weights.h5``.

    Raises:
        UserError: a weight is missing or has another shape.
        OSError: the file cannot be written.
    """
    load_tensors(model_tensors(model), arrays)
    model.save_weights(path)

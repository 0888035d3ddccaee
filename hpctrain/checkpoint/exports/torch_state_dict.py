"""Weights as a PyTorch state_dict."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch

from hpctrain.checkpoint.exports.weights import weights, write_whole
from hpctrain.checkpoint.reading import Loaded


def export_state_dict(loaded: Loaded, path: Path, averaged: bool = False) -> None:
    """Writes a file for ``model.load_state_dict(torch.load(path, weights_only=True))``. Raises UserError."""
    arrays, dtypes = weights(loaded, averaged)
    state = {name: tensor_of(np.array(array), dtypes[name]) for name, array in arrays.items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_whole(path, [buffer.getvalue()])


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor over an array's memory; bfloat16 comes as uint16."""
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(array)
    )

"""The monitor's map of every rank's busy time in every window, as its last window left it."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpctrain.system import safe_read

MOST_BYTES = 128 << 20
"""Of the map as it is stored: 512 windows of 100,000 ranks take 100 MB."""


def read(path: Path) -> NDArray[np.float64] | None:
    """float64[ranks or groups of them, windows]; None if there is none that can be read."""
    try:
        with os.fdopen(safe_read.open_plain(path), "rb") as file:
            excess = _array(file, "excess.npy").astype(np.float64)
    except (OSError, KeyError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile):
        return None
    return excess if excess.size else None


def _array(file: BinaryIO, name: str) -> NDArray[np.floating]:
    """A member of an archive of arrays; ValueError if it is more than a map, or none."""
    with zipfile.ZipFile(file) as archive, archive.open(name) as member:
        content = member.read(MOST_BYTES + 1)
    values: NDArray[np.floating] = np.load(io.BytesIO(content), allow_pickle=False)
    if len(content) > MOST_BYTES or values.dtype.kind != "f" or values.ndim != 2:
        raise ValueError("not a map")
    return values

"""The monitor's map of ranks and time, small enough for a page."""

from __future__ import annotations

import io
import os
import zipfile
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpctrain.run.folder import RunDir
from hpctrain.system import safe_read

MOST_BYTES = 128 << 20
"""Of the map as it is stored: 512 windows of 100,000 ranks take 100 MB."""
MOST_ROWS, MOST_COLUMNS = 64, 120


def read(run_dir: RunDir) -> dict[str, NDArray[np.float64]]:
    """Maps by title, float64[ranks or groups of them, windows]; none where the monitor left none."""
    try:
        with os.fdopen(safe_read.open_plain(run_dir.monitor / "heat.npz"), "rb") as file:
            excess = _array(file, "excess.npy").astype(np.float64) * 100
    except (OSError, KeyError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile):
        return {}
    return {"Busy time beyond the peers', by rank": shrink(excess)} if excess.size else {}


def _array(file: BinaryIO, name: str) -> NDArray[np.floating]:
    """A member of an archive of arrays; ValueError where it is more than a map, or none."""
    with zipfile.ZipFile(file) as archive, archive.open(name) as member:
        content = member.read(MOST_BYTES + 1)
    values = np.load(io.BytesIO(content), allow_pickle=False)
    if len(content) > MOST_BYTES or values.dtype.kind != "f" or values.ndim != 2:
        raise ValueError("not a map")
    return values


def shrink(values: NDArray[np.float64], rows: int = MOST_ROWS, columns: int = MOST_COLUMNS) -> NDArray[np.float64]:
    """The largest value of each block of neighbours; slow spots survive."""
    for axis, most in ((0, rows), (1, columns)):
        if values.shape[axis] > most:
            edges = np.linspace(0, values.shape[axis], most, endpoint=False).astype(np.int64)
            values = np.fmax.reduceat(values, edges, axis=axis)
    return values

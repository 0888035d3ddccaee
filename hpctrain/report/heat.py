"""The monitor's map of ranks and time, small enough for a page."""

from __future__ import annotations

import zipfile

import numpy as np
from numpy.typing import NDArray

from hpctrain.run.folder import RunDir

MOST_ROWS, MOST_COLUMNS = 64, 120


def read(run_dir: RunDir) -> dict[str, NDArray[np.float64]]:
    """Maps by title, float64[ranks or groups of them, windows]; none where the monitor left none."""
    try:
        with np.load(run_dir.monitor / "heat.npz", allow_pickle=False) as saved:
            excess = saved["excess"].astype(np.float64) * 100
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return {}
    return {"Busy time beyond the peers', by rank": shrink(excess)} if excess.size else {}


def shrink(values: NDArray[np.float64], rows: int = MOST_ROWS, columns: int = MOST_COLUMNS) -> NDArray[np.float64]:
    """The largest value of each block of neighbours; slow spots survive."""
    for axis, most in ((0, rows), (1, columns)):
        if values.shape[axis] > most:
            edges = np.linspace(0, values.shape[axis], most, endpoint=False).astype(np.int64)
            values = np.fmax.reduceat(values, edges, axis=axis)
    return values

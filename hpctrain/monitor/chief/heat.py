"""Each rank's excess over time, in bounded memory."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.system.files import write_atomically

COLUMNS = 512
"""Windows that are kept; when there are more, neighbours are merged to the larger value."""


class Heat:
    """A matrix of ranks and windows.

    Args:
        ranks: number of ranks.
        window_steps: steps of a window.
    """

    def __init__(self, ranks: int, window_steps: int) -> None:
        self.values = np.full((ranks, COLUMNS), np.nan, dtype=np.float16)
        self.steps_per_column = window_steps
        self.window_steps = window_steps
        self.used = 0

    def add(self, index: int, ranks: NDArray[np.int64], excess: NDArray[np.floating]) -> None:
        """Enters a window."""
        while (column := index * self.window_steps // self.steps_per_column) >= COLUMNS:
            self.values[:, : COLUMNS // 2] = np.fmax(self.values[:, ::2], self.values[:, 1::2])
            self.values[:, COLUMNS // 2 :] = np.nan
            self.steps_per_column *= 2
        self.values[ranks, column] = np.fmax(self.values[ranks, column], excess.astype(np.float16))
        self.used = max(self.used, column + 1) if self.steps_per_column == self.window_steps else column + 1

    def save(self, path: Path, root: Path | None = None) -> None:
        """Writes the matrix for the report; no link below ``root`` is followed.

        Raises:
            RunFailed: it cannot be written.
        """
        content = io.BytesIO()
        np.savez_compressed(content, excess=self.values[:, : self.used], steps_per_column=self.steps_per_column)
        write_atomically(path, content.getvalue(), root)

"""Each rank's excess over time, in bounded memory, and its picture."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.run.folder import write_atomically

COLUMNS = 512
"""Windows that are kept; when there are more, neighbours are merged to the larger value."""
ROWS = 512
"""Rows of the picture; more ranks are merged to the larger value."""


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

    def save(self, path: Path) -> None:
        """Writes the matrix for ``draw``.

        Raises:
            RunFailed: it cannot be written.
        """
        content = io.BytesIO()
        np.savez_compressed(content, excess=self.values[:, : self.used], steps_per_column=self.steps_per_column)
        write_atomically(path, content.getvalue())


def draw(data: Path, picture: Path, title: str = "") -> None:
    """Draws what ``Heat.save`` wrote. Needs matplotlib.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        from hpctrain.errors import MissingExtra

        raise MissingExtra("matplotlib", "report") from error
    with np.load(data, allow_pickle=False) as saved:
        excess, steps = saved["excess"].astype(np.float32), int(saved["steps_per_column"])
    ranks = len(excess)
    merged = -(-ranks // ROWS)
    padded = np.full((-(-ranks // merged) * merged, excess.shape[1]), -np.inf, dtype=np.float32)
    padded[:ranks] = np.nan_to_num(excess, nan=-np.inf)
    rows = padded.reshape(-1, merged, excess.shape[1]).max(axis=1)
    figure = Figure(figsize=(10, min(2 + 0.25 * len(rows), 10)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        np.ma.masked_invalid(100 * rows),
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        cmap="coolwarm",
        vmin=-25,
        vmax=25,
        extent=(0, excess.shape[1] * steps, -0.5 * merged, (len(rows) - 0.5) * merged),
    )
    axes.set_xlabel("step of this attempt")
    axes.set_ylabel("rank")
    axes.locator_params(axis="y", integer=True)
    axes.set_title(title or "busy time above the median of the other ranks")
    figure.colorbar(image, label="%", extend="both")
    FigureCanvasAgg(figure).print_png(picture)

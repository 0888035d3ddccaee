"""The ranks of a run by their places in the grid, as a picture: which host each is on, and who is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from hpctrain.report.chart import WIDTH, Chart
from hpctrain.report.svg import FAINT
from hpctrain.run.grid import Grid

MOST_COLUMNS, MOST_ROWS = 128, 64
"""Of a grid that is drawn; the heat map shows the ranks of a larger one."""
NAMES, RIGHT, TOP, BOTTOM, ROW, LETTER = 110, 12, 24, 26, 34, 6.5
"""Pixels: for names beside the rows, at the edges, of a row and of a letter."""


def typical(excess: NDArray[np.floating] | None, ranks: int) -> NDArray[np.float64]:
    """[ranks] each rank's median excess over the windows of an attempt, in percent; NaN for what is not known.

    Args:
        excess: [ranks, windows] shares, as the monitor leaves them.
        ranks: of the run.
    """
    found = np.full(ranks, np.nan)
    for rank, row in enumerate(excess[:ranks] if excess is not None else ()):
        known = row[np.isfinite(row)].astype(np.float64)
        found[rank] = 100 * float(np.median(known)) if known.size else np.nan
    return found


def is_drawn(grid: Grid) -> bool:
    """Whether ranks share out a model, and are few enough to be seen."""
    return not grid.is_plain and grid.data <= MOST_COLUMNS and grid.tensor * grid.pipeline <= MOST_ROWS


def draw(grid: Grid, hosts: Mapping[int, str], slowness: Sequence[float]) -> Chart:
    """Columns are data indexes, rows are stages and parts of layers; colours as in the heat map.

    Args:
        grid: places of the ranks.
        hosts: by rank, as far as they are known.
        slowness: [ranks] percent beyond the peers; NaN leaves a cell empty.
    """
    height, width = TOP + BOTTOM + ROW * grid.tensor * grid.pipeline, (WIDTH - NAMES - RIGHT) / grid.data
    values = np.asarray(slowness, dtype=np.float64)
    finite = values[np.isfinite(values)]
    scale = max(float(np.abs(finite).max()) if finite.size else 0.0, FAINT)
    body = [f'<text class="tick" x="{NAMES}" y="{height - 6}">columns: data index; a cell: rank and host</text>']
    for rank, value in enumerate(values.tolist()):
        place = grid.place(rank)
        x, y = NAMES + place.data * width, TOP + ROW * (place.stage * grid.tensor + place.tensor)
        if place.data == 0:
            names = [f"stage {place.stage}"] if grid.pipeline > 1 else []
            names += [f"tensor {place.tensor}"] if grid.tensor > 1 else []
            name = ", ".join(names)
            body.append(f'<text class="tick end" x="{NAMES - 6}" y="{y + ROW / 2 + 4:g}">{name}</text>')
        if y == TOP and len(str(grid.data)) * LETTER <= width:
            body.append(f'<text class="tick middle" x="{x + width / 2:.1f}" y="{TOP - 6}">{place.data}</text>')
        known = np.isfinite(value)
        share, host = abs(value) / scale if known else 0.0, hosts.get(rank, "")
        said = f"rank {rank}{grid.told(rank)}{f' on {host}' if host else ''}{f': {value:.1f}%' if known else ''}"
        data = f' data-value="{value:.2f}"' if known else ""
        body.append(
            f'<rect class="cell {"above" if value > 0 else "below"}" x="{x:.1f}" y="{y}" width="{width - 1:.2f}" '
            f'height="{ROW - 2}" fill-opacity="{0.05 + 0.95 * share:.2f}" data-rank="{rank}"{data}>'
            f"<title>{escape(said)}</title></rect>"
        )
        if len(str(rank)) * LETTER <= width:
            body.append(f'<text class="count middle" x="{x + width / 2:.1f}" y="{y + 14}">{rank}</text>')
        if host and len(host) * LETTER <= width:
            body.append(f'<text class="tick middle" x="{x + width / 2:.1f}" y="{y + 27}">{escape(host)}</text>')
    return Chart(f"Ranks by place: {grid}", height, "".join(body))

"""Fewer points that look the same: what a plot a few hundred pixels wide can show."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

POINTS = 400
"""Most points of one curve in a report."""


def thin(y: NDArray[np.float64], points: int = POINTS) -> NDArray[np.int64]:
    """Indices of at most ``points`` samples of a curve: each stretch's smallest and largest value, and the ends.

    Peaks and dips survive, unlike with averages or every n-th value. Values that are not finite are passed over.
    """
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= points:
        return finite
    edges = np.linspace(0, len(finite), (points - 2) // 2 + 1).astype(np.int64)
    chosen = {int(finite[0]), int(finite[-1])}
    for begin, end in itertools.pairwise(edges):
        stretch = finite[begin:end]
        chosen.add(int(stretch[np.argmin(y[stretch])]))
        chosen.add(int(stretch[np.argmax(y[stretch])]))
    return np.array(sorted(chosen), dtype=np.int64)

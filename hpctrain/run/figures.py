"""What metrics say that is no number, of the newest evaluation: curves and matrices, in <run folder>/figures.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.system import safe_read
from hpctrain.system.files import write_atomically
from hpctrain.system.json_shape import fits, is_count

MOST_BYTES = 16 << 20
"""Of the file; a larger one is not read."""


@dataclass(frozen=True)
class Curve:
    """A line through points, such as a ROC curve. A metric's ``compute`` may return one, for the report."""

    x_label: str
    """What ``x`` is."""
    y_label: str
    """What ``y`` is."""
    x: tuple[float, ...]
    """Of each point, in the order in which they are joined."""
    y: tuple[float, ...]
    """As many as ``x``."""


@dataclass(frozen=True)
class Matrix:
    """Counts of true against predicted classes. A metric's ``compute`` may return one, for the report."""

    labels: tuple[str, ...]
    """Names of the classes."""
    counts: tuple[tuple[int, ...], ...]
    """``counts[true][predicted]``; square, a row for each label."""


Figure = Curve | Matrix


@dataclass(frozen=True)
class Figures:
    """Of one evaluation."""

    step: int
    """Updates done before it."""
    figures: Mapping[str, Figure]
    """By metric name."""


def write_figures(path: Path, found: Figures, root: Path) -> None:
    """In place of those of the evaluation before. Raises OSError."""
    kinds = {name: as_json(figure) for name, figure in found.figures.items()}
    write_atomically(path, json.dumps({"step": found.step, "figures": kinds}, allow_nan=False).encode(), root)


def as_json(figure: Figure) -> dict[str, Any]:
    """Its fields, and ``kind``: Curve or Matrix."""
    return {"kind": type(figure).__name__, **vars(figure)}


def read_figures(path: Path) -> Figures | None:
    """None without any; what is damaged is left out."""
    try:
        read = safe_read.read_json(path, MOST_BYTES)
    except (OSError, ValueError):
        return None
    if not _is_file(read):
        return None
    figures = {str(name): figure for name, value in read["figures"].items() if (figure := _figure(value))}
    return Figures(read["step"], figures) if figures else None


def is_drawable(figure: Figure) -> bool:
    """Whether its parts fit each other, and a curve's points are finite numbers."""
    if isinstance(figure, Curve):
        points = [*figure.x, *figure.y]
        return len(figure.x) == len(figure.y) > 0 and all(math.isfinite(value) for value in points)
    return len(figure.labels) > 0 and {len(row) for row in (figure.labels, figure.counts, *figure.counts)} == {
        len(figure.labels)
    }


def _figure(read: Mapping[str, Any]) -> Figure | None:
    figure: Figure | None = None
    if read.get("kind") == "Curve" and _is_curve(read):
        figure = Curve(read["x_label"], read["y_label"], tuple(read["x"]), tuple(read["y"]))
    elif read.get("kind") == "Matrix" and _is_matrix(read):
        figure = Matrix(tuple(read["labels"]), tuple(map(tuple, read["counts"])))
    return figure if figure and is_drawable(figure) else None


def _has(kind: type, shape: Mapping[str, Any]) -> Any:
    right, names = fits(dict(shape)), {field.name for field in dataclasses.fields(kind)}
    return lambda value: right(value) and names <= set(value)


_is_curve = _has(Curve, {"x_label": str, "y_label": str, "x": [float], "y": [float]})
_is_matrix = _has(Matrix, {"labels": [str], "counts": [[is_count]]})
_is_file = _has(Figures, {"step": is_count, "figures": {str: dict}})

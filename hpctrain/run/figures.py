"""What a report shows besides events: curves, matrices, pictures, and the heat map of ranks."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpctrain.system import safe_read
from hpctrain.system.array_types import Floats, Reals
from hpctrain.system.files import write_atomically
from hpctrain.system.json_shape import is_count, maker, sound

MOST_FIGURE_BYTES = 16 << 20
"""Maximum size of figures.json; a larger one is not read."""


@dataclass(frozen=True)
class Curve:
    """A line through points, such as a ROC curve. A metric's ``compute`` may return one, for the report."""

    x_label: str
    """Label of the x axis."""
    y_label: str
    """Label of the y axis."""
    x: tuple[float, ...]
    """x coordinates, in the order in which points are joined."""
    y: tuple[float, ...]
    """y coordinates; same length as ``x``."""


@dataclass(frozen=True)
class Matrix:
    """Counts of true against predicted classes. A metric's ``compute`` may return one, for the report."""

    labels: tuple[str, ...]
    """Names of the classes."""
    counts: tuple[tuple[int, ...], ...]
    """``counts[true][predicted]``; square, one row per label."""


Figure = Curve | Matrix


@dataclass(frozen=True)
class Figures:
    """Figures of one evaluation."""

    step: int
    """Updates done before it."""
    figures: Mapping[str, Figure]
    """Figures by metric name."""


def write_figures(path: Path, found: Figures, root: Path) -> None:
    """Writes an evaluation's figures in place of the previous ones. Raises RunFailed."""
    kinds = {name: as_json(figure) for name, figure in found.figures.items()}
    write_atomically(path, json.dumps({"step": found.step, "figures": kinds}, allow_nan=False).encode(), root)


def as_json(figure: Figure) -> dict[str, Any]:
    """Returns a figure's fields, plus ``kind``: Curve or Matrix."""
    return {"kind": type(figure).__name__, **vars(figure)}


def read_figures(path: Path) -> Figures | None:
    """Reads the figures, without damaged ones; None if there are none."""
    try:
        read = _figures(safe_read.read_json(path, MOST_FIGURE_BYTES))
        step, found = read["step"], read["figures"]
    except (OSError, ValueError, KeyError):
        return None
    figures: dict[str, Figure] = {}
    for name, value in found.items():
        with contextlib.suppress(ValueError, KeyError):
            figure = KINDS[value["kind"]](value)
            figures |= {name: figure} if is_drawable(figure) else {}
    return Figures(step, figures) if figures else None


def is_drawable(figure: Figure) -> bool:
    """Whether the lengths are consistent, and a curve's points are finite numbers."""
    if isinstance(figure, Curve):
        points = [*figure.x, *figure.y]
        return len(figure.x) == len(figure.y) > 0 and all(math.isfinite(value) for value in points)
    return len(figure.labels) > 0 and {len(row) for row in (figure.labels, figure.counts, *figure.counts)} == {
        len(figure.labels)
    }


KINDS: Mapping[str, Callable[[Any], Figure]] = {"Curve": maker(Curve), "Matrix": maker(Matrix)}
_figures = sound({"step": is_count, "figures": {str: {"kind": str}}})

PNG = b"\x89PNG\r\n\x1a\n"
MOST_PICTURES = 24
"""Maximum number of pictures in a report: the last ones by name."""
MOST_PICTURE_BYTES = 4 << 20
"""Maximum size of one picture; larger ones are left out."""


@dataclass(frozen=True)
class Picture:
    """One PNG file."""

    name: str
    data: str
    """A data URI with the whole content."""


def read_pictures(folder: Path) -> list[Picture]:
    """Returns the last MOST_PICTURES PNG files of a folder by name; skips files that are not PNG or not readable."""
    found: list[Picture] = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".png")
    except OSError:
        return []
    for path in reversed(paths):
        if len(found) == MOST_PICTURES:
            break
        try:
            content = safe_read.read(path, MOST_PICTURE_BYTES)
        except OSError:
            continue
        if content.startswith(PNG):
            found.append(Picture(path.stem, f"data:image/png;base64,{base64.b64encode(content).decode()}"))
    return found[::-1]


MOST_MAP_BYTES = 128 << 20
"""Maximum size of the stored map: 512 windows of 100,000 ranks take 100 MB."""


def read_heat_map(path: Path) -> Floats | None:
    """Reads the map as float64[ranks or groups of ranks, windows]; None if it is missing or cannot be read."""
    try:
        with os.fdopen(safe_read.open_plain(path), "rb") as file:
            excess = _map_of(file).astype(np.float64)
    except (OSError, KeyError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile):
        return None
    return excess if excess.size else None


def _map_of(file: BinaryIO) -> Reals:
    """Reads the map's array from an npz archive. Raises ValueError if it is too large or not a map."""
    with zipfile.ZipFile(file) as archive, archive.open("excess.npy") as member:
        content = member.read(MOST_MAP_BYTES + 1)
    values: Reals = np.load(io.BytesIO(content), allow_pickle=False)
    if len(content) > MOST_MAP_BYTES or values.dtype.kind != "f" or values.ndim != 2:
        raise ValueError("not a map")
    return values

"""What a run leaves for its report besides events: curves, matrices, plans, pictures, and the map of its ranks."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpctrain.system import safe_read
from hpctrain.system.files import write_atomically
from hpctrain.system.json_shape import is_count, maker, sound

MOST_FIGURE_BYTES = 16 << 20
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
    """Same length as ``x``."""


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
    """In place of those of the evaluation before. Raises RunFailed."""
    kinds = {name: as_json(figure) for name, figure in found.figures.items()}
    write_atomically(path, json.dumps({"step": found.step, "figures": kinds}, allow_nan=False).encode(), root)


def as_json(figure: Figure) -> dict[str, Any]:
    """Its fields, and ``kind``: Curve or Matrix."""
    return {"kind": type(figure).__name__, **vars(figure)}


def read_figures(path: Path) -> Figures | None:
    """None without any; what is damaged is left out."""
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
    """Whether its parts fit each other, and a curve's points are finite numbers."""
    if isinstance(figure, Curve):
        points = [*figure.x, *figure.y]
        return len(figure.x) == len(figure.y) > 0 and all(math.isfinite(value) for value in points)
    return len(figure.labels) > 0 and {len(row) for row in (figure.labels, figure.counts, *figure.counts)} == {
        len(figure.labels)
    }


KINDS: Mapping[str, Callable[[Any], Figure]] = {"Curve": maker(Curve), "Matrix": maker(Matrix)}
_figures = sound({"step": is_count, "figures": {str: {"kind": str}}})

MOST_PLANS = 1000
"""That a picture shows; 840 ranks have 80."""


@dataclass(frozen=True)
class Planned:
    """A plan that partitions a model."""

    name: str
    """Such as ``tensor 2 x data 4``."""
    parts: Mapping[str, int]
    """Bytes of a rank, by purpose; the same keys in all plans."""

    @property
    def total(self) -> int:
        """Bytes of a rank."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plans:
    """All plans for a number of ranks."""

    plans: tuple[Planned, ...]
    """At least one."""
    memory: int | None = None
    """Bytes that a rank has, if that was said."""


def write_plans(path: Path, found: Plans, root: Path) -> None:
    """In place of those before. Raises RunFailed."""
    write_atomically(path, json.dumps(asdict(found), allow_nan=False).encode(), root)


def read_plans(path: Path) -> Plans | None:
    """None without any, or if the file is damaged."""
    try:
        found = _plans(safe_read.read_json(path))
    except (OSError, ValueError):
        return None
    if not 0 < len(found.plans) <= MOST_PLANS:
        return None
    kinds = set(found.plans[0].parts)
    names = [*kinds, *(each.name for each in found.plans)]
    same = all(set(each.parts) == kinds and each.total > 0 for each in found.plans)
    return found if kinds and same and all(map(str.isprintable, names)) else None


_plans = maker(Plans)

PNG = b"\x89PNG\r\n\x1a\n"
MOST_PICTURES = 24
"""Pictures in a report: the last ones by name."""
MOST_PICTURE_BYTES = 4 << 20
"""Of one picture; larger ones are left out."""


@dataclass(frozen=True)
class Picture:
    """One file."""

    name: str
    data: str
    """A URI that holds it all."""


def read_pictures(folder: Path) -> list[Picture]:
    """The last PNG files of a folder, in the order of their names; what is none, or cannot be read, is left out."""
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
"""Of the map as it is stored: 512 windows of 100,000 ranks take 100 MB."""


def read_heat_map(path: Path) -> NDArray[np.float64] | None:
    """float64[ranks or groups of them, windows]; None if there is none that can be read."""
    try:
        with os.fdopen(safe_read.open_plain(path), "rb") as file:
            excess = _map_of(file).astype(np.float64)
    except (OSError, KeyError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile):
        return None
    return excess if excess.size else None


def _map_of(file: BinaryIO) -> NDArray[np.floating]:
    """Of an archive of arrays; ValueError if it is more than a map, or none."""
    with zipfile.ZipFile(file) as archive, archive.open("excess.npy") as member:
        content = member.read(MOST_MAP_BYTES + 1)
    values: NDArray[np.floating] = np.load(io.BytesIO(content), allow_pickle=False)
    if len(content) > MOST_MAP_BYTES or values.dtype.kind != "f" or values.ndim != 2:
        raise ValueError("not a map")
    return values

"""Pictures that a task's hooks have left in <run folder>/pictures, for the report."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from hpctrain.system import safe_read

PNG = b"\x89PNG\r\n\x1a\n"
MOST = 24
"""Pictures in a report: the last ones by name."""
MOST_BYTES = 4 << 20
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
        if len(found) == MOST:
            break
        try:
            content = safe_read.read(path, MOST_BYTES)
        except OSError:
            continue
        if content.startswith(PNG):
            found.append(Picture(path.stem, f"data:image/png;base64,{base64.b64encode(content).decode()}"))
    return found[::-1]

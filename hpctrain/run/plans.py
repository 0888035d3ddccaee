"""What ``hpctrain plan --keep`` found, for the report: <run folder>/plans.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.system import safe_read
from hpctrain.system.files import write_atomically
from hpctrain.system.json_shape import fits, is_count, is_time

MOST_PLANS = 1000
"""That a picture shows; 840 ranks have 80."""


@dataclass(frozen=True)
class Planned:
    """A plan that shares out a model."""

    name: str
    """Such as ``tensor 2 x data 4``."""
    parts: Mapping[str, int]
    """Bytes of a rank, by what they are for; of all plans the same."""
    step_s: float | None = None
    """Expected seconds of a step; None if they are not known."""

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
        read = safe_read.read_json(path)
    except (OSError, ValueError):
        return None
    if not _is_file(read) or not {"plans", "memory"} <= set(read) or not 0 < len(read["plans"]) <= MOST_PLANS:
        return None
    if any(set(each) != {"name", "parts", "step_s"} for each in read["plans"]):
        return None
    plans = tuple(Planned(**each) for each in read["plans"])
    kinds = set(plans[0].parts)
    same = kinds and all(map(_is_name, kinds)) and all(set(each.parts) == kinds and each.total > 0 for each in plans)
    return Plans(plans, read["memory"]) if same else None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


_is_file = fits(
    {"plans": [{"name": _is_name, "parts": {str: is_count}, "step_s": (is_time, None)}], "memory": (is_count, None)}
)

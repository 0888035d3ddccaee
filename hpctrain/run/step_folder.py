"""Names of the folders that checkpoints lie in."""

from __future__ import annotations

import re

PATTERN = re.compile(r"step-(\d{9,18})")


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name, or None: longer numbers have no zeros before them."""
    match = PATTERN.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None

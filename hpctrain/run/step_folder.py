"""Names of the folders that checkpoints lie in."""

from __future__ import annotations

import os
import re
from pathlib import Path

PARTIAL = ".partial-"
"""Prefix of a folder that is being written."""
BEGUN_AGAIN = ".begun-again"
"""A file that each run with ``--fresh`` replaces: unless ``CLAIMED`` is in it, no checkpoint in the store counts."""
CLAIMED = b"claimed"
PATTERN = re.compile(r"step-(\d{9,18})")


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name, or None: longer numbers have no zeros before them."""
    match = PATTERN.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def bytes_in_flight(checkpoints: Path) -> int:
    """Bytes so far of the checkpoints that are being written in a folder; 0 if nothing is to be seen."""
    total = 0
    try:
        for partial in os.scandir(checkpoints):
            if partial.name.startswith(PARTIAL) and partial.is_dir(follow_symlinks=False):
                total += sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(partial))
    except OSError:  # it was committed, or cleared away, in between
        return 0
    return total

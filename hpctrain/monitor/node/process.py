"""A look at one process. Not being able to look is no evidence of anything."""

from __future__ import annotations

import os
from pathlib import Path

GONE = ""
"""The process has ended, or its number is another's now."""
UNSEEN = "?"
"""The observer could not look: no descriptors, no memory, no permission."""


def look(pid: int, started: float) -> str:
    """The kernel's letter for what a process does (R, S, D, T, Z, ...), GONE, or UNSEEN.

    Args:
        pid: its number.
        started: clock ticks from boot to its start, as `processes.birth` has them; 0 if they are not known.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return UNSEEN if exists(pid) else GONE
    except OSError:
        return UNSEEN
    return fields[0] if started in (0, float(fields[19])) else GONE


def exists(pid: int) -> bool:
    """Whether a process of this user has the number; takes no descriptor."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True

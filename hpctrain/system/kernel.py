"""Reads files of the kernel, such as those of /proc and /sys, which may be missing or not readable."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def read_text(path: Path) -> str:
    """A file's text; empty if it cannot be read. The kernel may cut process names in mid-character."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def names_in(folder: Path) -> list[str]:
    """A folder's entries; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []

"""Options that several benchmarks take."""

from __future__ import annotations

from pathlib import Path

from hpctrain.errors import UserError


def existing_folder(text: str) -> Path:
    """A folder that an option names. Raises UserError."""
    if not Path(text).is_dir():
        raise UserError(f"--folder {text} is not a folder", "name one that is there, on the disk to measure")
    return Path(text)

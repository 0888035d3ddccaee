"""Shell scripts in place of programs such as Slurm's."""

from __future__ import annotations

from pathlib import Path

import pytest


def write_programs(folder: Path, **scripts: str) -> None:
    """Write bash scripts of these lines to a folder, by name."""
    for name, lines in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / name).chmod(0o755)


def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Write such scripts, and find no other programs than these and the system's own."""
    write_programs(folder, **scripts)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

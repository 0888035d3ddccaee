"""The files and commands of docs/tutorial.md, extracted from the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILE = re.compile(r"`([\w.]+\.(?:py|yaml))`[^`]*?:\n\n```(?:python|yaml)\n(.*?)```", re.S)
"""A file name, followed by a block with its content."""


def write_files(folder: Path) -> list[str]:
    """Write the page's files to a folder, and return their names."""
    found = FILE.findall(TEXT)
    for name, content in found:
        (folder / name).write_text(content, encoding="utf-8")
    return [name for name, _ in found]


def commands() -> list[list[str]]:
    """All commands in page order, split into words."""
    lines = [line for block in re.findall(r"```console\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]

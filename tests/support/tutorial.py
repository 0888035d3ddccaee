"""The files and commands of docs/tutorial.md, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILE = re.compile(r"`([\w.]+\.(?:py|yaml))`[^`]*?:\n\n```(?:python|yaml)\n(.*?)```", re.S)
"""A name, then its content in a block of its own."""


def write_files(folder: Path) -> list[str]:
    """Writes what the reader is told to write; the names."""
    found = FILE.findall(TEXT)
    for name, content in found:
        (folder / name).write_text(content, encoding="utf-8")
    return [name for name, _ in found]


def commands() -> list[list[str]]:
    """Every command, word by word, in the order of the page."""
    lines = [line for block in re.findall(r"```console\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]

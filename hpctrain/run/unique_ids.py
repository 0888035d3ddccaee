"""Numbers that only go up, each of which exactly one process gets: the fence between attempts and locks."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.system.files import cannot_write, create_exclusively, make_folder

TICKET = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class UniqueIds:
    """Numbers that only go up: each is a file that exactly one process creates, and that never changes or goes away."""

    folder: Path
    run: Path
    """The run folder, below which no link is followed."""

    def path(self, number: int, what: str = "") -> Path:
        """The file that stands for a number, or one that says more about it."""
        return self.folder / (f"{number}.{what}.json" if what else f"{number}.json")

    def taken(self) -> list[int]:
        """All numbers that are taken, ascending."""
        # An NFS client may list a folder as it was up to a minute ago. Changing the folder makes it ask the server.
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        try:
            return sorted(int(match[1]) for match in map(TICKET.fullmatch, os.listdir(self.folder)) if match)
        except FileNotFoundError:
            return []

    def newest(self) -> int:
        """The highest number that is taken, 0 if none is."""
        return max(self.taken(), default=0)

    def make_folder(self) -> None:
        """Makes the folder. Raises RunFailed if it cannot be made."""
        try:
            make_folder(self.folder, self.run)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def claim(self, number: int, content: bytes) -> bool:
        """Takes this number; False if another process has it. Raises RunFailed if it cannot be written."""
        self.make_folder()
        return create_exclusively(self.path(number), content, self.run)

    def take(self, content: bytes, above: int = 0) -> int:
        """Takes the next number, higher than ``above`` and than all that are taken. Raises RunFailed, see ``claim``."""
        try:
            number = max(above, self.newest()) + 1
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        while not self.claim(number, content):
            number += 1
        return number

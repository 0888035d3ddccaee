"""Blocks that are slow to read, kept while there is room: in memory, and on the node's disk, where the ranks of a node
read each once, from run to run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpctrain.errors import UserError
from hpctrain.system.files import make_private

MAPPED_BYTES = 2**20
"""What a mapped block counts in memory: it takes a descriptor, of which there are not many."""


class Sized(Protocol):
    """An array, or a table."""

    @property
    def nbytes(self) -> int:
        """Of memory that it takes."""


Block = TypeVar("Block", bound=Sized)


class BlockCache:
    """The blocks used last, up to ``limit_bytes`` of them together; safe with several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.blocks: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], Block]) -> Block:
        """The block of this key, read if it is not here."""
        with self.lock:
            kept: Block | None = self.blocks.get(key)
            if kept is not None:
                self.blocks.move_to_end(key)
                return kept
        block = read()
        with self.lock:
            if key not in self.blocks:
                self.blocks[key] = block
                self.num_bytes += block.nbytes
            while self.num_bytes > self.limit_bytes:
                self.num_bytes -= self.blocks.popitem(last=False)[1].nbytes
        return block


FOLDER = "HPCTRAIN_CACHE"
"""Variable of the environment that names the folder; by default one of this user's in that for temporary files."""
LONGEST_WAIT_S = 300.0
"""For another process that makes the same block; after that this one makes it, too, which harms nothing."""
LEFTOVER_S = 3600.0
"""Age of a file that a killed process has not finished."""
BLOCK = re.compile(r"[0-9a-f]{64}\.block")
ATTEMPTS = 3
Opened = TypeVar("Opened")


@dataclass(frozen=True)
class DiskCache:
    """Files by key, in a folder that this user alone may enter; they take half of what the disk has free, at most."""

    folder: Path

    @classmethod
    def of_node(cls) -> DiskCache | None:
        """The one that all ranks of a node share; None if the disk cannot hold one."""
        default = Path(tempfile.gettempdir(), f"hpctrain-cache-{os.geteuid()}")
        folder = Path(os.environ.get(FOLDER) or default)
        try:
            make_private(folder)
        except OSError:
            return None
        return cls(folder)

    def get(self, key: str, write: Callable[[Path], None], read: Callable[[Path], Opened]) -> Opened:
        """The block of this key.

        Args:
            key: identifies its content.
            write: makes its file, which appears whole or not at all.
            read: opens it, so that it can be used when its file is gone. Raises UserError.
        """
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.block"
        with alone(path.with_suffix(".lock")):
            for _ in range(ATTEMPTS):
                if not path.exists():
                    write(path)
                    self.make_room()
                with contextlib.suppress(UserError, FileNotFoundError):
                    os.utime(path)
                    return read(path)
                path.unlink(missing_ok=True)  # damaged, or another process made room
            write(path)
            return read(path)

    def make_room(self) -> None:
        """Removes what was not used for longest, and what was not finished."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if BLOCK.fullmatch(path.name):
                    files.append((status.st_mtime_ns, 512 * status.st_blocks, path))
                elif time.time() - status.st_mtime > LEFTOVER_S:
                    path.unlink(missing_ok=True)
        used = sum(size for _, size, _ in files)
        limit = (used + shutil.disk_usage(self.folder).free) // 2
        for _, size, path in sorted(files)[:-1]:
            if used > limit:
                path.unlink(missing_ok=True)
                used -= size


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """While no other process does the same, as long as one can wait for that."""
    with path.open("w") as file:
        end = time.monotonic() + LONGEST_WAIT_S
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break  # a file system without such locks
        yield

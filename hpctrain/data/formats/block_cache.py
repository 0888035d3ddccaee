"""LRU caches for blocks that are slow to read: in memory, and on the node's disk, where all ranks of a node share them
and later runs find them again."""

from __future__ import annotations

import contextlib
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
from hpctrain.system.files import make_private, take_lock

MAPPED_BYTES = 2**20
"""Size attributed to a memory-mapped block, to limit their number, because each holds a file descriptor."""


class Sized(Protocol):
    """An object of known size, such as an array or a table."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""


Block = TypeVar("Block", bound=Sized)


class BlockCache:
    """The most recently used blocks, up to ``limit_bytes`` in total; thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.blocks: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], Block]) -> Block:
        """The block of this key; calls ``read`` if it is not cached."""
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
"""Environment variable that names the cache's folder; the default is a per-user folder in the temporary one."""
LONGEST_WAIT_S = 300.0
"""Wait for another process that makes the same block; after that, this process makes it too, which is harmless."""
LEFTOVER_S = 3600.0
"""Unfinished files older than this were left by killed processes."""
BLOCK = re.compile(r"[0-9a-f]{64}\.block")
ATTEMPTS = 3
Opened = TypeVar("Opened")


@dataclass(frozen=True)
class DiskCache:
    """Files by key in a folder private to the user, limited to half of the space otherwise free on the disk."""

    folder: Path

    @classmethod
    def of_node(cls) -> DiskCache | None:
        """The cache that all ranks of a node share; None if its folder cannot be created."""
        default = Path(tempfile.gettempdir(), f"hpctrain-cache-{os.geteuid()}")
        folder = Path(os.environ.get(FOLDER) or default)
        try:
            make_private(folder)
        except OSError:
            return None
        return cls(folder)

    def get(self, key: str, write: Callable[[Path], None], read: Callable[[Path], Opened]) -> Opened:
        """The block of this key, which is created if it is missing or damaged.

        Args:
            key: identifies the content.
            write: writes the file, atomically.
            read: opens the file; the result must stay usable after the file is deleted. Raises UserError if damaged.
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
                path.unlink(missing_ok=True)  # damaged, or evicted by another process
            write(path)
            return read(path)

    def make_room(self) -> None:
        """Remove the least recently used blocks beyond the limit, and leftover unfinished files."""
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
    """Hold an exclusive lock while the body runs; after LONGEST_WAIT_S the body runs without it."""
    with path.open("w") as file:
        end = time.monotonic() + LONGEST_WAIT_S
        while not take_lock(file.fileno()) and time.monotonic() < end:
            time.sleep(0.02)
        yield

"""Files that are there after a power loss, and files that are what they seem."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 8 << 20
"""Bytes of one system call."""


def write_durably(path: Path, data: NDArray[np.uint8] | bytes) -> None:
    """Writes a new file and returns when its bytes are on the disk. Its name is durable after ``sync_folder``."""
    view = memoryview(data) if isinstance(data, bytes) else data.data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        position = 0
        while position < len(view):
            position += os.pwrite(descriptor, view[position : position + BLOCK_BYTES], position)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_folder(path: Path) -> None:
    """Makes a folder and its parents, and the names of those that were missing durable."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def open_regular(path: Path) -> int:
    """Descriptor for reading a plain file.

    Raises:
        OSError: it is a link, folder, pipe or device, or cannot be read. Never waits for a pipe's other end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return descriptor

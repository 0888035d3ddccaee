"""Durable writes, safe reads of regular files, and classification of file-system errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.errors import UserError
from hpctrain.system.array_types import Bytes
from hpctrain.system.files import sync
from hpctrain.system.safe_read import NotPlain, open_plain

try:  # several times as fast as zlib, with the same checksums
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

BLOCK_BYTES = 8 << 20
"""Bytes per system call."""
NOT_A_FILE = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})
"""Errors when something other than a regular file is opened."""
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors that persist until permissions or mounts change."""


def write_durably(path: Path, data: Bytes | bytes, mode: int = 0o666) -> None:
    """Write a new file; returns when its bytes are on disk. Its name is durable after ``sync``."""
    view = memoryview(data) if isinstance(data, bytes) else data.data
    with created(path, mode) as descriptor:
        write_at(descriptor, view, 0)
        os.fsync(descriptor)


@contextmanager
def created(path: Path, mode: int = 0o666) -> Iterator[int]:
    """Create a new file; yields a descriptor for writing. ``mode`` is subject to the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all bytes at an offset in a file."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + BLOCK_BYTES], offset + done)


def read_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill ``view`` with the bytes at an offset in a file. Raises OSError if the file is too short."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + BLOCK_BYTES]], offset + done)
        if count == 0:
            raise OSError(f"the file ends after {offset + done} bytes")
        done += count


def make_durable_folder(path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


open_regular = partial(open_plain, flags=os.O_NOFOLLOW)
"""Open a regular file for reading, not through a link; returns a descriptor. Raises as ``open_plain`` does."""


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """Open a regular file of a checkpoint for reading; yields a descriptor. Also converts errors in the body.

    Raises:
        DamagedCheckpoint, UnreadableCheckpoint, UserError: see ``reading_error``.
    """
    try:
        descriptor = open_regular(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except (OSError, MemoryError) as error:
        raise reading_error(error, path) from error


def reading_error(error: OSError | MemoryError, path: Path) -> DamagedCheckpoint | UnreadableCheckpoint | UserError:
    """Classify an error of reading: the file is unreadable now, damaged, or not accessible to this user."""
    if not isinstance(error, OSError):
        return UnreadableCheckpoint(f"{path} cannot be read now: it does not fit into memory")
    if isinstance(error, NotPlain) or error.errno in NOT_A_FILE:
        return DamagedCheckpoint(f"{path} is not a plain file")
    if error.errno in REFUSED:
        return UserError(f"{path} cannot be read: {error.strerror}", "give the account of the run access to it")
    if error.errno == errno.ENOENT and is_unlisted(path):
        return DamagedCheckpoint(f"{path} is missing")
    return UnreadableCheckpoint(f"{path} cannot be read now: {error.strerror or error}")


def is_unlisted(path: Path) -> bool:
    """Whether the folder's listing lacks the file too: a file server may temporarily deny that a file exists."""
    try:
        return path.name not in os.listdir(path.parent)
    except OSError:
        return False


def is_absent(path: str | Path) -> bool:
    """Whether the path certainly does not exist; False after other errors."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def names_in_folder(path: Path) -> list[str]:
    """Names in a folder; empty if there is no folder.

    Raises:
        UnreadableCheckpoint, UserError: see ``reading_error``.
    """
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise reading_error(error, path) from error

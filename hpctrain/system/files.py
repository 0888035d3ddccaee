"""Safe writes in folders that others may have tampered with: run folders, shared scratch, /tmp.

A symbolic link in place of a file would cause another file to be overwritten, one in place of a folder would cause
files elsewhere to be removed. All writes to such folders go through this module. Folders are walked by descriptor, no
link is followed below ``root``, and a new file either replaces nothing or has an unpredictable name.

``root`` is the folder named by the user: links in the path to it are trusted and followed. By default it is the file's
own folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hpctrain.errors import NotAllowed, RunFailed, file_errors

FILE_MODE, FOLDER_MODE = 0o664, 0o775
"""Modes before the umask; nothing is made writable by everyone."""
NOT_SUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that cannot sync folders: some of FUSE, CIFS, 9p."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def take_lock(descriptor: int) -> bool | None:
    """Takes the exclusive lock of an open file or folder; False if another process of this host holds it.

    The kernel frees it when the descriptor is closed. None on a file system without locks, such as a folder of NFS.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class Diverted(OSError):
    """Something else, such as a link, is in place of one of our files or folders."""


@contextlib.contextmanager
def opened(folder: Path, root: Path | None = None, make: bool = False) -> Iterator[int]:
    """Context manager that opens a folder and yields its descriptor, for use as ``dir_fd``.

    Args:
        folder: the folder.
        root: the folder or one above it; no link is followed below it.
        make: create missing folders, including ``root`` and its parents.

    Raises:
        Diverted: a part of the path below ``root`` is a link.
        OSError: the folder is missing, or cannot be opened or created.
    """
    place = folder if root is None else root
    if make:
        place.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    handle = os.open(place, _FOLDER)
    try:
        for name in folder.relative_to(place).parts:
            place = place / name
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, FOLDER_MODE, dir_fd=handle)
            inner = _opened(name, _FOLDER, handle, place)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Creates a folder and missing parents. Raises as ``opened`` does."""
    with opened(folder, root, make=True):
        pass


def make_private(folder: Path) -> None:
    """Creates a folder that only this user can enter, even if others can guess its name.

    Raises:
        Diverted: it exists and belongs to another user, or is a link.
        OSError: it cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700, parents=True)
    handle = _opened(str(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, None, folder)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise Diverted(errno.EPERM, "it belongs to another user", str(folder))
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def open_file(path: Path, flags: int, root: Path | None = None) -> int:
    """Opens a regular file with ``flags`` such as O_WRONLY | O_APPEND | O_CREAT; returns its descriptor.

    Does not block on a pipe.

    Raises:
        Diverted: it is something else, such as a link.
        OSError: the file is missing or cannot be opened.
    """
    with opened(path.parent, root) as folder:
        handle = _opened(path.name, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, folder, path)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Diverted(errno.EINVAL, f"{path} is not a plain file", str(path))
    return handle


def open_log(path: Path, root: Path | None = None, fresh: bool = False) -> int:
    """Opens a file for appending; ``fresh`` replaces an existing one. Raises as ``open_file`` does."""
    if not fresh:
        return open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, root)
    with opened(path.parent, root) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return os.open(path.name, _NEW | os.O_APPEND, FILE_MODE, dir_fd=folder)


def write_atomically(path: Path, content: bytes, root: Path | None = None, mode: int = FILE_MODE) -> None:
    """Writes a file atomically: after a crash there is the old or the new file, never a mixture.

    ``mode``: permissions before the umask.

    Raises:
        RunFailed: it cannot be written.
    """
    temporary = _unguessable(path)
    with writing(path), opened(path.parent, root) as folder:
        try:
            _write_new(temporary, content, mode, folder)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


@contextlib.contextmanager
def replacement(path: Path, first_wins: bool = False) -> Iterator[Path]:
    """Context manager that yields a new file next to ``path``, with the same suffixes, and then replaces ``path``.

    The file is synced to disk first. If the body raises, it is removed and ``path`` is unchanged. With ``first_wins``,
    an existing file is kept, since others may already read it. Raises OSError.
    """
    temporary = path.with_name(_unguessable(path))
    os.close(os.open(temporary, _NEW, FILE_MODE))
    try:
        yield temporary
        sync(temporary)
        if not (first_wins and _link_new(temporary, path)):
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync(path.parent)


def _link_new(path: Path, name: Path) -> bool:
    """Hard-links a file to ``name`` unless it exists. Returns whether ``name`` exists now (not without hard links)."""
    try:
        os.link(path, name)
    except FileExistsError:
        return True
    except OSError:
        return name.exists()
    return True


def create_exclusively(path: Path, content: bytes, root: Path | None = None) -> bool:
    """Creates a file with this content; False if it exists. Exactly one of several callers gets True, also on NFS.

    Others never see it empty or in part, if the file system has hard links: an empty STOP file is a user's request.

    Raises:
        RunFailed: it cannot be written.
    """
    temporary = _unguessable(path)
    with writing(path), opened(path.parent, root) as folder:
        try:
            _write_new(temporary, content, FILE_MODE, folder)
            try:
                os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except OSError:  # it exists, there are no links, or NFS repeated a call that had succeeded
                if os.stat(temporary, dir_fd=folder).st_nlink < 2:
                    return _create_without_links(path.name, content, folder)
            return True
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)


def _write_new(name: str, content: bytes, mode: int, folder: int) -> None:
    """Creates a file of a folder with this content, on disk. A server may report a full disk only then."""
    with open(os.open(name, _NEW, mode, dir_fd=folder), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _create_without_links(name: str, content: bytes, folder: int) -> bool:
    try:
        _write_new(name, content, FILE_MODE, folder)
    except FileExistsError:
        return False
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise
    return True


def append_bytes(path: Path, lines: bytes, root: Path | None = None) -> int:
    """Appends whole lines in one write; returns how many of their bytes were written.

    If a crash or a full disk left an incomplete line, it is terminated first. Raises OSError.
    """
    handle = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, root)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        return max(0, os.write(handle, b"\n" * torn + lines) - torn)
    finally:
        os.close(handle)


def overwrite(path: Path, content: bytes, root: Path | None = None) -> None:
    """Overwrites the start of a file in place, which also works on a full disk. Creates the file if it is missing.

    Raises OSError.
    """
    handle = open_file(path, os.O_WRONLY | os.O_CREAT, root)
    try:
        os.write(handle, content)
    finally:
        os.close(handle)


def remove_folder(folder: Path, root: Path | None = None) -> None:
    """Removes a folder and its files; does not follow a link in its place. Raises as ``opened`` does."""
    with opened(folder.parent, root or folder.parent) as above:
        handle = _opened(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, above, folder)
        try:
            for name in os.listdir(handle):
                os.unlink(name, dir_fd=handle)
        finally:
            os.close(handle)
        os.rmdir(folder.name, dir_fd=above)


def sync(path: Path) -> None:
    """Syncs a file, or a folder's entries, to disk; file systems that cannot sync folders do not need it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Replaces a file with what ``write`` puts into a temporary one with the same suffixes. Raises UserError."""
    with file_errors(f"{path} cannot be written", "choose another --output"), replacement(path) as temporary:
        write(temporary)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that turns an OSError into a RunFailed that names ``path``."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> RunFailed:
    """Makes the user's error from an OSError."""
    if isinstance(error, Diverted):
        return RunFailed(f"cannot write {path}: {error.strerror}", "remove what is in its place; nothing is lost")
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotAllowed(
            f"cannot write {path}: {error.strerror}", "ask its owner for the permission, or set another run_dir"
        )
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free space or raise the quota there" if full else "check that the folder exists and may be written"
    return RunFailed(f"cannot write {path}: {error.strerror}", f"{fix}, then run the same command again")


def _opened(name: str, flags: int, folder: int | None, path: Path) -> int:
    """Opens an entry of a folder; raises Diverted if it is a link or of another kind."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            kind = "a link, which is not followed here" if _is_link(name, folder) else "not what should be there"
            raise Diverted(error.errno, f"{path} is {kind}", str(path)) from error
        raise


def _is_link(name: str, folder: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)
    except OSError:
        return False


def _unguessable(path: Path) -> str:
    return f".{os.urandom(8).hex()}.{path.name}"


def write_all(files: Mapping[Path, bytes]) -> Callable[[], object]:
    """Writes files, each as ``write_atomically`` in its folder; returns a function that puts back those it replaced.

    Raises:
        RunFailed: a file cannot be written.
    """
    before = {path: path.read_bytes() for path in files if path.is_file()}
    for path, content in files.items():
        write_atomically(path, content, path.parent)
    return lambda: write_all(before)

"""Files that this program writes where others may have been before it: in run folders, shared scratch, /tmp.

A link in a file's place would have another file overwritten, one in a folder's place would have files elsewhere
removed. Everything that writes into such a folder goes through here. Folders are walked by descriptor, no link is
followed below ``root``, and a new file either replaces nothing or has an unpredictable name.

``root`` is the folder that the user has named: links on the way to it are the user's own, and are followed. By default
it is the file's own folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.errors import RunFailed, file_errors

FILE_MODE, FOLDER_MODE = 0o664, 0o775
"""Less what the user's umask takes away; nothing is made for everybody to write."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Diverted(OSError):
    """Something that leads elsewhere, such as a link, in place of one of our files or folders."""


@contextlib.contextmanager
def opened(folder: Path, root: Path | None = None, make: bool = False) -> Iterator[int]:
    """Descriptor of a folder, to be used as ``dir_fd``.

    Args:
        folder: the folder.
        root: itself or one above it; no link is followed below.
        make: make it if it is missing, and ``root`` with its parents.

    Raises:
        Diverted: a part of the path below ``root`` is a link.
        OSError: the folder is missing, or cannot be entered or made.
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
    """Makes a folder, and those above it that are missing. Raises as ``opened`` does."""
    with opened(folder, root, make=True):
        pass


def make_private(folder: Path) -> None:
    """Makes a folder that this user alone can enter, although others can guess its name.

    Raises:
        Diverted: there is one that is another user's, or a link.
        OSError: it cannot be made.
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
    """Descriptor of a plain file, for ``flags`` such as O_WRONLY | O_APPEND | O_CREAT. Waits for no pipe's other end.

    Raises:
        Diverted: there is something else, such as a link.
        OSError: the file is missing, or may not be opened.
    """
    with opened(path.parent, root) as folder:
        handle = _opened(path.name, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, folder, path)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Diverted(errno.EINVAL, f"{path} is not a plain file", str(path))
    return handle


def open_log(path: Path, root: Path | None = None, fresh: bool = False) -> int:
    """Descriptor to append to; ``fresh`` to a new file, whatever was there before. Raises as ``open_file`` does."""
    if not fresh:
        return open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, root)
    with opened(path.parent, root) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return os.open(path.name, _NEW | os.O_APPEND, FILE_MODE, dir_fd=folder)


def write_atomically(path: Path, content: bytes, root: Path | None = None, mode: int = FILE_MODE) -> None:
    """Replaces a file by one with this content; after a crash there is the old or the new one, never a mixture.

    ``mode``: permissions, of which the process' mask is taken.

    Raises:
        RunFailed: it cannot be written.
    """
    temporary = _unguessable(path)
    with writing(path), opened(path.parent, root) as folder:
        try:
            with open(os.open(temporary, _NEW, mode, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


@contextlib.contextmanager
def replacement(path: Path, first_wins: bool = False) -> Iterator[Path]:
    """An empty file next to ``path``, with the same suffixes, which replaces it once the body has filled it.

    It is on the disk by then; if the body raises, it is removed and ``path`` stays as it was. With ``first_wins``, what
    another process has put there by then stays too: others may have begun to read it. Raises OSError.
    """
    temporary = path.with_name(_unguessable(path))
    os.close(os.open(temporary, _NEW, FILE_MODE))
    try:
        yield temporary
        handle = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if not (first_wins and _link_new(temporary, path)):
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)


def _link_new(path: Path, name: Path) -> bool:
    """Gives a file a second name unless something has that name; False where the file system has no such links."""
    try:
        os.link(path, name)
    except FileExistsError:
        return True
    except OSError:
        return name.exists()
    return True


def create_exclusively(path: Path, content: bytes, root: Path | None = None) -> bool:
    """Makes a file with this content; False if it exists. Exactly one of many callers gets True, on NFS too.

    Raises:
        RunFailed: it cannot be written.
    """
    try:
        with opened(path.parent, root) as folder:
            handle = os.open(path.name, _NEW, FILE_MODE, dir_fd=folder)
            try:
                os.write(handle, content)
            except OSError:  # left empty, it would say something else: a STOP file, that a person asks for the end
                with contextlib.suppress(OSError):
                    os.unlink(path.name, dir_fd=folder)
                raise
            finally:
                os.close(handle)
    except FileExistsError:
        return False
    except OSError as error:
        raise cannot_write(path, error) from error
    return True


def append_bytes(path: Path, lines: bytes, root: Path | None = None) -> int:
    """Appends whole lines in one write; how many bytes of them there was room for.

    A line that a crash or a full disk tore before is closed first, so that it spoils nothing. Raises OSError.
    """
    handle = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, root)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        return max(0, os.write(handle, b"\n" * torn + lines) - torn)
    finally:
        os.close(handle)


def overwrite(path: Path, content: bytes, root: Path | None = None) -> None:
    """Writes over a file's beginning, in place: that works on a full disk, too. Makes the file if it is missing.

    Raises OSError.
    """
    handle = open_file(path, os.O_WRONLY | os.O_CREAT, root)
    try:
        os.write(handle, content)
    finally:
        os.close(handle)


def remove_folder(folder: Path, root: Path | None = None) -> None:
    """Removes a folder and the files in it; a link in its place is not followed. Raises as ``opened`` does."""
    with opened(folder.parent, root or folder.parent) as above:
        handle = _opened(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, above, folder)
        try:
            for name in os.listdir(handle):
                os.unlink(name, dir_fd=handle)
        finally:
            os.close(handle)
        os.rmdir(folder.name, dir_fd=above)


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Replaces a file by the output of ``write`` to a temporary one with the same suffixes. Raises UserError."""
    with file_errors(f"{path} cannot be written", "choose another --output"), replacement(path) as temporary:
        write(temporary)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the file system in the body become RunFailed, which names a path."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> RunFailed:
    """The error for the user."""
    if isinstance(error, Diverted):
        return RunFailed(f"cannot write {path}: {error.strerror}", "remove what is in its place; nothing is lost")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free space or raise the quota there" if full else "check that the folder exists and may be written"
    return RunFailed(f"cannot write {path}: {error.strerror}", f"{fix}, then run the same command again")


def _opened(name: str, flags: int, folder: int | None, path: Path) -> int:
    """A descriptor of what has this name in a folder, unless it is a link."""
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

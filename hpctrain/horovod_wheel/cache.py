"""Wheels that wait to be installed: where they lie, and whose they are.

A wheel runs with the rights of whoever installs it. From a folder that others can write to, one is taken only if no
one but this user and root can have written the file.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.system import safe_read
from hpctrain.system.files import replacement

BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
BLOCK_BYTES = 1 << 20
BUILD_OWN = "run hpctrain install-horovod without --wheel-dir: it builds your own"


def own_folder() -> Path:
    """This user's cache: builds, and their wheels unless another folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpctrain" / "horovod"


def make_private(folder: Path) -> None:
    """Makes a folder that no other user can write to.

    Raises:
        UserError: it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        fix = "set XDG_CACHE_HOME, or --wheel-dir, to a folder of your own"
        raise UserError(f"{folder} belongs to {_name(status.st_uid)}, and wheels are built in it", fix)
    folder.chmod(stat.S_IMODE(status.st_mode) & ~BY_OTHERS)


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's, and no other user can write to it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & BY_OTHERS


def share(wheel: Path, folder: Path) -> Path:
    """Copies a wheel into a folder that others use, too; its place there. Raises OSError."""
    with replacement(folder / wheel.name) as partial:
        partial.write_bytes(wheel.read_bytes())
        partial.chmod(0o644)
    return folder / wheel.name


@contextlib.contextmanager
def checked(wheel: Path) -> Iterator[Path]:
    """A private copy of a wheel, which no other user can change.

    Raises:
        UserError: it is not of this user or root, or others can write to it.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-wheel-") as room:
        copy = Path(room, wheel.name)
        try:
            with os.fdopen(safe_read.open_plain(wheel), "rb") as source, open(copy, "xb") as target:
                require_trusted(wheel, os.fstat(source.fileno()), os.geteuid())
                shutil.copyfileobj(source, target, BLOCK_BYTES)
        except OSError as error:
            raise UserError(f"{wheel} cannot be used: {error.strerror}", BUILD_OWN) from error
        yield copy


def require_trusted(wheel: Path, status: os.stat_result, user: int) -> None:
    """Raises UserError unless only the user or root can have written a file."""
    if status.st_uid not in (user, 0):
        raise UserError(f"{wheel} belongs to {_name(status.st_uid)}, who could have put anything into it", BUILD_OWN)
    if status.st_mode & BY_OTHERS:
        fix = f"if you know that it is sound: chmod go-w {wheel}; else {BUILD_OWN}"
        raise UserError(f"{wheel} may be written by others", fix)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"

"""Wheels that wait to be installed: whose they are, and whether they are what was built.

A wheel runs with the rights of whoever installs it. One from a folder that others can write to is taken only from its
user or root, and if its content is what this user's own builds have left, or else what its own record says.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import os
import pwd
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.system import safe_read
from hpctrain.system.files import replacement

BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
BLOCK_BYTES = 1 << 20
BUILD_OWN = "run hpctrain install-horovod without --wheel-dir: it builds your own"


def own_folder() -> Path:
    """This user's cache: builds, their wheels unless another folder is named, and the sums of all of them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpctrain" / "horovod"


def make_private(folder: Path) -> None:
    """Makes a folder that nobody else can write to.

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
    """Whether a folder is this user's, and nobody else can write to it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & BY_OTHERS


def keep(wheel: Path) -> None:
    """Notes the sum of a wheel that was built here."""
    wheel.chmod(0o644)
    with contextlib.suppress(OSError, UserError):  # a full home: its own record then speaks for the wheel
        make_private(own_folder())
        _sum_file(wheel.name).write_text(hashlib.sha256(wheel.read_bytes()).hexdigest() + "\n")


def share(wheel: Path, folder: Path) -> Path:
    """Copies a wheel into a folder that others use, too; its place there. Raises OSError."""
    with replacement(folder / wheel.name) as partial:
        partial.write_bytes(wheel.read_bytes())
        partial.chmod(0o644)
    return folder / wheel.name


@contextlib.contextmanager
def checked(wheel: Path) -> Iterator[Path]:
    """A copy of a wheel that nobody can change any more.

    Raises:
        UserError: it is not of this user or root, others can write to it, or its content is not what was built.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-wheel-") as room:
        copy = Path(room, wheel.name)
        try:
            with os.fdopen(safe_read.open_plain(wheel), "rb") as source, open(copy, "xb") as target:
                require_trusted(wheel, os.fstat(source.fileno()), os.geteuid())
                shutil.copyfileobj(source, target, BLOCK_BYTES)
        except OSError as error:
            raise UserError(f"{wheel} cannot be used: {error.strerror}", BUILD_OWN) from error
        built = built_sum(wheel.name)
        with open(copy, "rb") as file:
            if built is not None and hashlib.file_digest(file, "sha256").hexdigest() != built:
                fix = "hpctrain install-horovod --force builds it again"
                raise UserError(f"{wheel} is not the wheel that was built: its SHA-256 differs", fix)
        if built is None and (problem := record_problem(copy)):
            raise UserError(f"{wheel} is damaged: {problem}", "hpctrain install-horovod --force builds it again")
        yield copy


def require_trusted(wheel: Path, status: os.stat_result, user: int) -> None:
    """Raises UserError unless only the user or root can have written a file."""
    if status.st_uid not in (user, 0):
        raise UserError(f"{wheel} belongs to {_name(status.st_uid)}, who could have put anything into it", BUILD_OWN)
    if status.st_mode & BY_OTHERS:
        fix = f"if you know that it is sound: chmod go-w {wheel}; else {BUILD_OWN}"
        raise UserError(f"{wheel} may be written by others", fix)


def built_sum(name: str) -> str | None:
    """The SHA-256 of the wheel of a name that this user has built; None if there was none."""
    try:
        return safe_read.read(_sum_file(name), 100).decode().strip() or None
    except (OSError, ValueError):
        return None


def record_problem(wheel: Path) -> str | None:
    """Why the files in a wheel are not what its RECORD (PEP 427) says; None if they are."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            (record,) = [name for name in names if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
            listed = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
            if sorted(names) != sorted(listed):
                return "it holds other files than it lists"
            for name in names:
                if name != record and listed[name] != _digest(archive, name):
                    return f"{name} is not what it lists"
    except (OSError, ValueError, LookupError, RuntimeError, zipfile.BadZipFile) as error:
        return f"it is not a whole wheel ({error})"
    return None


def _digest(archive: zipfile.ZipFile, name: str) -> str:
    digest = hashlib.sha256()
    with archive.open(name) as member:
        while block := member.read(BLOCK_BYTES):
            digest.update(block)
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def _sum_file(name: str) -> Path:
    return own_folder() / f"{name}.sha256"


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"

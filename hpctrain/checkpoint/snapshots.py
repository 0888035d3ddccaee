"""Folders of snapshots on a node: lists, claims, adopts and removes them.

``<path>/hpctrain-snapshots-<run>-<place>/attempt-<number>/step-<number>/`` has the shards of the node's ranks, and
those of another node if there are copies. Each attempt has a separate folder, so that a snapshot which an older attempt
completes late is never taken for the newest state.

In a node's memory, the state is copied directly into the shard file, which is then sealed, that is, linked under its
final name. A memory tier therefore holds one finished copy and one that is being filled, and copies nothing twice.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import stat
import weakref
import zlib
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.format.durable_files import write_at
from hpctrain.checkpoint.format.paced_write import BLOCK_BYTES, Dropped
from hpctrain.checkpoint.format.shard import ShardImage, Skeleton
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import HpctrainError, StoreDown
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir, step_named
from hpctrain.system import cgroups
from hpctrain.system.array_types import Bytes
from hpctrain.system.files import make_private
from hpctrain.system.retry import retry_files

PREFIX = "hpctrain-snapshots-"
"""Prefix of a run's folder."""
ATTEMPT = "attempt-"
"""Prefix of the folders of attempts in it."""
OWNER = "run_dir"
"""File with the path of the run folder and the node number."""
HEAD_FILE = "snapshot.json"
"""A manifest without shards, written last. The available shards are found when a resume surveys all nodes."""
STAGING = ".staging-"
"""Prefix of files that are being filled."""
SPARE_BYTES = 1 << 20
"""Memory per rank that must stay free."""
SHARD = re.compile(r"shard-(\d{5,9})-of-(\d{5,9})\.h5")
GONE_S = 600.0
"""Age after which snapshots are removed if their run folder is gone."""
OLD_S = 24 * 3600.0
"""Age after which snapshots of other runs are removed."""


class SnapshotStore(CheckpointStore):
    """The snapshots of one attempt; if a newer attempt removes the folder, it is not created again."""

    file_mode = 0o600
    _last_file = HEAD_FILE
    send: Callable[[Path], None] | None = None

    def copy_by(self, send: Callable[[Path], None]) -> None:
        """From now on, send each shard to another node as well; all nodes do so."""
        self.send = send

    def copy(self, shard: Path) -> None:
        if self.send:
            self.send(shard)

    def prepare_folder(self, partial: Path) -> None:
        partial.mkdir(0o700, exist_ok=True)

    def free_bytes(self, partial: Path) -> int:
        """Free space in bytes; with copies, half of it is reserved for those of another node."""
        return super().free_bytes(partial) // (2 if self.send else 1)

    def _shards(self, partial: Path, ranks: int) -> tuple[list[bytes], int]:
        """No indexes, since shards are on several nodes, and the bytes of this node's shards."""
        return [], sum(entry.stat().st_size for entry in os.scandir(partial))


class MemoryStore(SnapshotStore):
    """Snapshots in memory, whose files are the staging memory itself."""

    def free_bytes(self, partial: Path) -> int:
        """Free space in bytes, also within the job's memory limit."""
        left, free = cgroups.memory_left(), super().free_bytes(partial)
        if left is None:
            return free
        return min(left // 2 if self.send else left, free)

    def image(self, plan: Skeleton, allocate: Callable[..., Bytes], number: int) -> ShardImage:
        # The node's ranks check at the same time, before any of them has allocated, so require room for all.
        self.require_room(self.path, (plan.num_bytes + SPARE_BYTES) * self.local.size)
        return SealedImage(plan, allocate, self.path / f"{STAGING}{self.group.rank}-{number}", self.file_mode)

    def close(self) -> None:
        super().close()
        with suppress(OSError):  # removed with the folder
            for file in self.path.glob(f"{STAGING}{self.group.rank}-*"):
                file.unlink(missing_ok=True)


def shards_here(home: Path, trained: int) -> dict[str, list[int]]:
    """The snapshots on this node of attempt ``trained`` and later ones, if ``home`` is private to the user.

    Returns, by folder relative to ``home``, the total number of shards followed by the indices of those on this node.
    Nothing if ``home`` cannot be read: a node's broken disk must not end the run, which has other checkpoints.
    """
    with suppress(OSError, StoreDown):
        return retry_files(partial(list_shards, home, trained))
    return {}


def list_shards(home: Path, trained: int) -> dict[str, list[int]]:
    """See ``shards_here``. Raises OSError."""
    found: dict[str, list[int]] = {}
    for head in home.glob(f"{ATTEMPT}*/step-*/{HEAD_FILE}") if is_own(home) else ():
        folder = head.parent
        if number_of(folder.parent) >= trained and step_named(folder.name) is not None:
            names = filter(None, map(SHARD.fullmatch, os.listdir(folder)))
            numbers = sorted((int(name[1]), int(name[2])) for name in names)
            if len({count for _, count in numbers}) == 1:
                found[str(folder.relative_to(home))] = [numbers[0][1], *(index for index, _ in numbers)]
    return found


def home_name(attempts: Attempts) -> str | None:
    """Name of a run's folder; None before the run has an ID.

    A copy of a run folder has the ID of the original if that was not in sight when the copy began, and must neither
    read nor remove the snapshots of that.
    """
    run = attempts.info().get("id")
    place = zlib.crc32(bytes(attempts.run_dir.path.resolve()))
    return run and f"{PREFIX}{run}-{place:08x}"


def number_of(attempt: Path) -> int:
    """The number in an attempt folder's name; -1 if it has none."""
    number = attempt.name.removeprefix(ATTEMPT)
    return int(number) if number.isdecimal() else -1


def is_own(home: Path) -> bool:
    """Whether a folder is private to this user, since /dev/shm is writable by everyone. Raises OSError."""
    try:
        found = home.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def claim(home: Path, run_dir: Path, node: int) -> str | None:
    """Create a run's folder and its owner file; returns an error message, or None."""
    if not home.is_absolute():
        return f"{home.parent} is not an absolute path"
    try:
        make_private(home)
        (home / OWNER).write_text(owner(run_dir, node))
    except OSError as error:
        return f"{home}: {error.strerror or error}"
    return None


def adopt(home: Path, own: Path, resumed: Path | None, run_dir: Path, node: int) -> str | None:
    """Move the snapshot that was resumed from to this attempt's folder, ``own``, and remove all other attempts.

    Call it after all nodes have claimed their folders. Returns an error message, or None.
    """
    try:
        if (home / OWNER).read_text() != owner(run_dir, node):
            return f"{home} is one folder on several nodes"
        own.mkdir(0o700, exist_ok=True)
        if resumed and home in resumed.parents and resumed.parent != own:
            os.rename(resumed, own / resumed.name)
        for attempt in home.glob(f"{ATTEMPT}*"):
            if attempt != own:
                shutil.rmtree(attempt, ignore_errors=True)
    except OSError as error:
        return f"{home}: {error.strerror or error}"
    return None


def owner(run_dir: Path, node: int) -> str:
    """Content of the owner file."""
    return f"{run_dir.resolve()}\n{node}"


def sweep(home: Path, used: Collection[Path], now: float) -> None:
    """Remove a run's folder unless it is in use, and folders next to it that dead runs of this user left."""
    with suppress(OSError):
        for other in home.parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if is_own(other) and other not in used and (other == home or is_dead(other, now)):
                    shutil.rmtree(other, ignore_errors=True)


def is_dead(home: Path, now: float) -> bool:
    """Whether no attempt will resume from a run's snapshots."""
    attempts = list(home.glob(f"{ATTEMPT}*"))
    age_s = now - max(folder.stat().st_mtime for folder in [home, *attempts])
    run_dir = RunDir(Path((home / OWNER).read_text().partition("\n")[0]))
    if not run_dir.path.exists():
        return age_s > GONE_S
    with suppress(HpctrainError):
        trained = Attempts(run_dir).info().get("trained") or 0
        if trained > max(map(number_of, attempts), default=trained):
            return True  # the run continues elsewhere, or is complete
    return age_s > OLD_S


class SealedImage(ShardImage):
    """A shard image in a memory-mapped file, which ``write`` links under the shard's name.

    It may be filled again when that name is no longer needed.

    Args:
        plan: the shard's skeleton.
        allocate: as ``HostMemory.staging``.
        file: the file to create; replaced if it exists.
        mode: its permissions, before the umask.

    Raises:
        OSError: there is not enough space.
    """

    keeps = True

    def __init__(self, plan: Skeleton, allocate: Callable[..., Bytes], file: Path, mode: int) -> None:
        self.file = file
        file.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(file, flags, mode)
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, plan.num_bytes)
        memory = mmap.mmap(self.descriptor, plan.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        super().__init__(plan, lambda num_bytes: allocate(num_bytes, np.frombuffer(memory, np.uint8)))

    def write(self, path: Path, is_dropped: Callable[[], bool] = lambda: False, mode: int = 0o666) -> None:
        """Compute the checksums, add the index, and link the file as ``path``. Raises OSError, Dropped."""
        size = self.buffer.size
        for begin in range(0, size, BLOCK_BYTES):
            if is_dropped():
                raise Dropped("its writer was asked to stop", "nothing is to be done")
            self.sum_up(begin, begin + BLOCK_BYTES)
        write_at(self.descriptor, memoryview(self._index(path.name)), size)
        os.fsync(self.descriptor)
        os.link(self.file, path)

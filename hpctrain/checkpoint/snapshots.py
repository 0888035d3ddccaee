"""Folders of snapshots on a node: what it has of each, what becomes this attempt's, and what is removed.

``<path>/hpctrain-snapshots-<run>/attempt-<number>/step-<number>/`` has the shards of the node's ranks, and those of
another node if there are copies. Each attempt has a folder, so that what an older one seals late is never taken for
the newest state.

In a node's memory a shard is sealed: the state is copied into the file itself, which then only gets its name. So a
tier there holds one copy besides the one that is being filled, and writes nothing twice.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.files import write_at
from hpctrain.checkpoint.format.paced_write import BLOCK_BYTES, Dropped
from hpctrain.checkpoint.format.shard import ShardImage, Skeleton
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import HpctrainError
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir, step_named
from hpctrain.system import cgroups
from hpctrain.system.files import make_private

PREFIX = "hpctrain-snapshots-"
"""Of the folder of a run."""
ATTEMPT = "attempt-"
"""Of the folders in it."""
OWNER = "run_dir"
"""File with the path of the run folder, and the node."""
HEAD_FILE = "snapshot.json"
"""A manifest without shards, written last: which of them there are is seen when all nodes have come together."""
STAGING = ".staging-"
"""Prefix of files that are filled."""
SPARE_BYTES = 1 << 20
"""In memory, that must stay free."""
SHARD = re.compile(r"shard-(\d{5,9})-of-(\d{5,9})\.h5")
GONE_S = 600.0
"""Age of a snapshot whose run folder is gone, and ..."""
OLD_S = 24 * 3600.0
"""... of any of another run, after which it is removed."""


class SnapshotStore(CheckpointStore):
    """The snapshots of one attempt, in a folder that is never made again once a newer attempt has removed it."""

    file_mode = 0o600
    _last_file = HEAD_FILE
    send: Callable[[Path], None] | None = None

    def copy_by(self, send: Callable[[Path], None]) -> None:
        """From now on, each shard is given to another node as well; so do the others."""
        self.send = send

    def copy(self, shard: Path) -> None:
        if self.send:
            self.send(shard)

    def prepare_folder(self, partial: Path) -> None:
        partial.mkdir(0o700, exist_ok=True)

    def free_bytes(self, partial: Path) -> int:
        """Half of what is left is for another node's copies."""
        return super().free_bytes(partial) // (2 if self.send else 1)

    def _shards(self, partial: Path, ranks: int) -> tuple[list[bytes], int]:
        """Nothing: which of them there are is seen when the nodes have come together. Bytes of what this one has."""
        return [], sum(entry.stat().st_size for entry in os.scandir(partial))


class MemoryStore(SnapshotStore):
    """Snapshots that are the staging memory itself."""

    def free_bytes(self, partial: Path) -> int:
        """What is in memory counts against the limit of the job, too."""
        left, free = cgroups.memory_left(), super().free_bytes(partial)
        return free if left is None else min(left // (2 if self.send else 1), free)

    def image(self, plan: Skeleton, allocate: Callable[..., NDArray[np.uint8]], number: int) -> ShardImage:
        # The node's ranks ask at the same time, before any of them has taken its part.
        self.require_room(self.path, (plan.num_bytes + SPARE_BYTES) * (self.local or self.group).size)
        return SealedImage(plan, allocate, self.path / f"{STAGING}{self.group.rank}-{number}", self.file_mode)

    def close(self) -> None:
        super().close()
        for file in self.path.glob(f"{STAGING}{self.group.rank}-*"):
            file.unlink(missing_ok=True)


def shards_here(home: Path, trained: int) -> dict[str, list[int]]:
    """What a node has of the snapshots of the attempts from ``trained`` on, in a run's folder that no other user can
    write: by folder in it, how many shards there are, and which of them are here."""
    found: dict[str, list[int]] = {}
    for head in home.glob(f"{ATTEMPT}*/step-*/{HEAD_FILE}") if is_own(home) else ():
        folder = head.parent
        if number_of(folder.parent) >= trained and step_named(folder.name) is not None:
            names = filter(None, map(SHARD.fullmatch, os.listdir(folder)))
            numbers = sorted((int(name[1]), int(name[2])) for name in names)
            if len({count for _, count in numbers}) == 1:
                found[str(folder.relative_to(home))] = [numbers[0][1], *(index for index, _ in numbers)]
    return found


def number_of(attempt: Path) -> int:
    """Of an attempt's folder; -1 if it is none."""
    number = attempt.name.removeprefix(ATTEMPT)
    return int(number) if number.isdecimal() else -1


def is_own(home: Path) -> bool:
    """Whether a folder is this user's alone: /dev/shm is everybody's."""
    try:
        found = home.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def claim(home: Path, run_dir: Path, node: int) -> str | None:
    """Makes a run's folder, and notes whose it is; why that cannot be, or None."""
    if not home.is_absolute():
        return f"{home.parent} is not an absolute path"
    try:
        make_private(home)
        (home / OWNER).write_text(owner(run_dir, node))
    except OSError as error:
        return f"{home}: {error.strerror or error}"
    return None


def adopt(home: Path, own: Path, resumed: Path | None, run_dir: Path, node: int) -> str | None:
    """Makes the snapshot resumed from this attempt's, in ``own``, and removes the others; why not, or None.

    Call it when all nodes have claimed their folders.
    """
    try:
        if (home / OWNER).read_text() != owner(run_dir, node):
            return f"{home} is one folder on several nodes"
        own.mkdir(0o700, exist_ok=True)
        if resumed and home in resumed.parents and resumed.parent != own:
            os.rename(resumed, own / resumed.name)
    except OSError as error:
        return f"{home}: {error.strerror or error}"
    for attempt in home.glob(f"{ATTEMPT}*"):
        if attempt != own:
            shutil.rmtree(attempt, ignore_errors=True)
    return None


def owner(run_dir: Path, node: int) -> str:
    """Content of the file that says whose a folder is."""
    return f"{run_dir.resolve()}\n{node}"


def sweep(home: Path, used: Collection[Path], now: float) -> None:
    """Removes a run's folder unless it is in use, and what this user's dead runs have left next to it."""
    for other in home.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if is_own(other) and other not in used and (other == home or is_dead(other, now)):
                shutil.rmtree(other, ignore_errors=True)


def is_dead(home: Path, now: float) -> bool:
    """Whether no attempt is expected to resume from a run's snapshots."""
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
    """A shard's image in a file, which ``write`` gives a second name; to be filled again when that one is not needed.

    Args:
        plan: of the shard.
        allocate: as ``HostMemory.staging``.
        file: replaced if it exists.
        mode: permissions, of which the process' mask is taken.

    Raises:
        OSError: there is no room.
    """

    keeps = True

    def __init__(self, plan: Skeleton, allocate: Callable[..., NDArray[np.uint8]], file: Path, mode: int) -> None:
        self.file = file
        file.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(file, flags, mode)
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, plan.num_bytes)
        memory = mmap.mmap(self.descriptor, plan.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        super().__init__(plan, lambda num_bytes: allocate(num_bytes, np.frombuffer(memory, np.uint8)))

    def write(self, path: Path, is_dropped: Callable[[], bool] = lambda: False, mode: int = 0o666) -> None:
        """Sums the file up, adds its index, and gives it its name. Raises OSError, Dropped."""
        size = self.buffer.size
        for begin in range(0, size, BLOCK_BYTES):
            if is_dropped():
                raise Dropped("its writer was asked to stop", "nothing is to be done")
            self.sum_up(begin, begin + BLOCK_BYTES)
        write_at(self.descriptor, memoryview(self._index(path.name)), size)
        os.fsync(self.descriptor)
        os.link(self.file, path)

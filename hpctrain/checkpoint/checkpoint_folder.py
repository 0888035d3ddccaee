"""A folder of checkpoints on disk, with atomic and durable commits."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format import shard_index
from hpctrain.checkpoint.format.durable_files import make_durable_folder, names_in_folder, open_regular, write_durably
from hpctrain.checkpoint.format.layout import (
    MANIFEST_FILE,
    DamagedCheckpoint,
    Manifest,
    shard_file,
)
from hpctrain.checkpoint.format.shard import ShardImage, Skeleton
from hpctrain.checkpoint.policy import KEEP_ALL, Retention
from hpctrain.checkpoint.read_retry import retry_read
from hpctrain.comm.group import Group
from hpctrain.errors import Code, RunFailed, UserError
from hpctrain.run.folder import PARTIAL, name_of_step, step_named
from hpctrain.system.array_types import Bytes
from hpctrain.system.files import sync

TRASH = ".trash-"
"""Prefix of a folder that is being deleted."""
REPLACED = ".replaced-"
"""Prefix of a checkpoint that is being replaced by another of the same step."""


def no_fence() -> None:
    """The fence if no other process writes to the folder; never raises."""


class CheckpointFolder:
    """Lists, commits, removes and renames checkpoints, ``step-<number>/``, in a folder.

    See ``CheckpointStore`` for the arguments.
    """

    file_mode = 0o666
    """Permissions of shards and manifests, before the umask."""
    _last_file = MANIFEST_FILE
    """The file that completes a checkpoint."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: Retention = KEEP_ALL,
        group: Group | None = None,
        fence: Callable[[], None] = no_fence,
        peers: Group | None = None,
        copies: Group | None = None,
        local: Group | None = None,
    ) -> None:
        self.path = Path(path)
        self.keep = keep
        self.group = group or Group("alone")
        self.fence = fence
        self.peers = peers or self.group
        self.copies = copies or Group("alone")
        self.local = local or self.group

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending. Whether they are sound is only known after ``load`` or ``verify``.

        Raises:
            UnreadableCheckpoint, UserError: the folder cannot be listed.
        """
        found = map(step_named, retry_read(lambda: names_in_folder(self.path)))
        return sorted(step for step in found if step is not None)

    def best(self) -> int | None:
        """The newest checkpoint that was the best when it was saved; None if there is none.

        Raises:
            UnreadableCheckpoint: one that may be it cannot be read now.
        """
        for step in reversed(self.steps()):
            with suppress(DamagedCheckpoint, UserError):
                if retry_read(partial(self.manifest, step)).meta.get("best"):
                    return step
        return None

    def folder(self, step: int) -> Path:
        """The folder of a step's checkpoint, which need not exist yet."""
        return self.path / name_of_step(step)

    def where(self, step: int) -> str:
        """Location of a step's checkpoint, for messages."""
        return str(self.folder(step))

    @contextmanager
    def whole(self, step: int) -> Iterator[Path]:
        """A step's folder, with all its files on disk while the body runs."""
        yield self.folder(step)

    def manifest(self, step: int) -> Manifest:
        """Read a checkpoint's manifest, without retries. Raises DamagedCheckpoint, UnreadableCheckpoint, UserError."""
        return manifest_file.read(self.folder(step), step)

    def partial(self, step: int, token: str) -> Path:
        """Folder in which a checkpoint is written before it is committed."""
        return self.path / f"{PARTIAL}{name_of_step(step)}-{token}"

    def prepare_folder(self, partial: Path) -> None:
        """Create the folder of a partial checkpoint, unless another rank has."""
        make_durable_folder(self.path)
        partial.mkdir(exist_ok=True)

    def image(self, plan: Skeleton, allocate: Callable[..., Bytes], number: int) -> ShardImage:
        """Allocate this process's staging memory ``number``. Raises MemoryError, OSError, RunFailed."""
        return ShardImage(plan, allocate)

    def copy(self, shard: Path) -> None:
        """Called when a shard is durable; subclasses may copy it elsewhere. Raises OSError."""

    def free_bytes(self, partial: Path) -> int:
        """Free space for a partial checkpoint, in bytes."""
        free = os.statvfs(partial)
        return free.f_bavail * free.f_frsize

    def require_room(self, folder: Path, needed: int) -> None:
        """Raise RunFailed if fewer bytes are free."""
        if (available := self.free_bytes(folder)) < needed:
            lack = f"{self.path} has {available / 1e6:.1f} MB free, {needed / 1e6:.1f} MB are needed"
            raise RunFailed(f"{os.strerror(errno.ENOSPC)}: {lack}", "free space there", Code.DISK_FULL)

    def commit(
        self,
        partial: Path,
        step: int,
        ranks: int,
        meta: Mapping[str, Any],
        looks_through: bool = False,
        owners: int | None = None,
    ) -> int:
        """Commit a partial checkpoint whose shards are durable; returns the shards' bytes. Called by one process.

        ``owners``: number of ranks with rank-local state, if not all.

        Raises DamagedCheckpoint if shards are incomplete or, with ``looks_through``, do not cover all tensors.

        Order: write the manifest, sync the folder, check the fence, rename the folder, sync its parent.
        """
        texts, total = self._shards(partial, ranks)
        data = manifest_file.encode(step, owners or ranks, meta, texts)
        if looks_through and texts:
            manifest_file.parse(data, str(partial / MANIFEST_FILE))
        self.seal(partial, step, self._last_file, data)
        return total

    def seal(self, partial: Path, step: int, file: str, data: bytes) -> None:
        """Write the last file of a partial checkpoint and rename its folder. Raises OSError, Replaced."""
        write_durably(partial / file, data, self.file_mode)
        sync(partial)
        self.fence()
        target = self.folder(step)
        replaced = self.path / f"{REPLACED}{target.name}-{secrets.token_hex(4)}"
        try:
            if target.exists():
                os.rename(target, replaced)
                sync(self.path)
            os.rename(partial, target)
        except OSError:  # if a newer attempt removed the partial checkpoint, one in its place is that attempt's
            if replaced.exists() and not target.exists():
                os.rename(replaced, target)
            raise
        sync(self.path)
        with suppress(OSError):  # the checkpoint is there; what it replaced is removed at the next start
            if replaced.exists():
                self._delete(replaced)

    def _shards(self, partial: Path, ranks: int) -> tuple[list[bytes], int]:
        """Indexes of a partial checkpoint's shards, for its last file, and their bytes. Raises DamagedCheckpoint."""
        found = [index_of(partial / shard_file(rank, ranks)) for rank in range(ranks)]
        return [text for text, _ in found], sum(num_bytes for _, num_bytes in found)

    def remove(self, step: int) -> None:
        """Delete a checkpoint, after a check of the fence."""
        self.fence()
        self._delete(self.folder(step))

    def discard(self, partial: Path) -> None:
        """Delete a checkpoint that was not committed."""
        if partial.is_dir():
            self._delete(partial)

    def put_aside(self, step: int, why: str) -> Path:
        """Rename a checkpoint to ``<why>-step-...`` so that it is never used again; its files are kept."""
        self.fence()
        aside = self.path / f"{why}-{name_of_step(step)}-{secrets.token_hex(4)}"
        os.rename(self.folder(step), aside)
        sync(self.path)
        return aside

    def sweep(self) -> list[str]:
        """Remove what killed processes left; returns the names. Called by one process, before it lists checkpoints.

        A process of an older attempt that is still writing finds its folder gone and cannot commit. The fence is
        checked before each removal, so that an older attempt does not remove anything.
        """
        if not self.path.is_dir():
            return []
        leftovers = sorted(entry for entry in self.path.iterdir() if entry.name.startswith((PARTIAL, TRASH, REPLACED)))
        leftovers = [entry for entry in leftovers if entry.is_dir() and not entry.is_symlink()]
        for entry in leftovers:
            self.fence()
            target = self.path / entry.name.removeprefix(REPLACED).rpartition("-")[0]
            if entry.name.startswith(REPLACED) and not target.exists():
                os.rename(entry, target)
                sync(self.path)
            else:
                self._delete(entry)
        return [entry.name for entry in leftovers]

    def _delete(self, folder: Path) -> None:
        """Rename, then delete, so that no half-deleted folder has a checkpoint's name, not even after a power loss."""
        trash = folder
        if not folder.name.startswith(TRASH):
            trash = self.path / f"{TRASH}{folder.name.lstrip('.')}-{secrets.token_hex(4)}"
            os.rename(folder, trash)
            sync(self.path)
        shutil.rmtree(trash, ignore_errors=True)  # files that a file server still holds are removed at the next start


def index_of(path: Path) -> tuple[bytes, int]:
    """A shard's index and the shard's size in bytes. Raises DamagedCheckpoint if the shard is incomplete."""
    descriptor = open_regular(path)
    try:
        return shard_index.read_text(descriptor, path), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)

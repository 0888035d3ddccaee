"""A folder of checkpoints on disk: a new one appears complete and durable, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format import shard_index
from hpctrain.checkpoint.format.files import listed, make_durable_folder, open_regular, write_durably
from hpctrain.checkpoint.format.layout import MANIFEST_FILE, Manifest, shard_file
from hpctrain.checkpoint.format.shard import ShardImage, Skeleton
from hpctrain.checkpoint.patience import patiently
from hpctrain.errors import Code, RunFailed
from hpctrain.run.folder import PARTIAL, name_of_step, step_named
from hpctrain.system.files import sync_folder

TRASH = ".trash-"
"""Prefix of a folder that is being deleted."""
REPLACED = ".replaced-"
"""Prefix of a checkpoint that is replaced by another of the same step."""


def no_fence() -> None:
    """No other process writes to the folder."""


class CheckpointFolder:
    """Checkpoints, ``step-<number>/`` each: which there are, and how one is committed, removed or put aside.

    Args:
        path: made with its parents when the first checkpoint is written.
        fence: called before each commit and each removal; raises Replaced if this process may no longer write.
    """

    file_mode = 0o666
    """Permissions of shards and manifests, of which the process' mask is taken."""
    _last_file = MANIFEST_FILE
    """Makes a partial checkpoint that of a step."""

    def __init__(self, path: str | os.PathLike[str], fence: Callable[[], None] = no_fence) -> None:
        self.path = Path(path)
        self.fence = fence

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending. Whether they are sound is known after ``load`` or ``verify``.

        Raises:
            UnreadableCheckpoint, UserError: the folder cannot be listed.
        """
        found = map(step_named, patiently(lambda: listed(self.path)))
        return sorted(step for step in found if step is not None)

    def folder(self, step: int) -> Path:
        """The folder of a step's checkpoint, which need not exist yet."""
        return self.path / name_of_step(step)

    def where(self, step: int) -> str:
        """Of a step's checkpoint, for people."""
        return str(self.folder(step))

    @contextmanager
    def whole(self, step: int) -> Iterator[Path]:
        """A step's folder, with all that is in it here as long as the body runs."""
        yield self.folder(step)

    def manifest(self, step: int) -> Manifest:
        """A checkpoint's manifest. Raises DamagedCheckpoint, UnreadableCheckpoint, UserError; tries once."""
        return manifest_file.read(self.folder(step), step)

    def partial(self, step: int, token: str) -> Path:
        """Folder in which a checkpoint is written before it is committed."""
        return self.path / f"{PARTIAL}{name_of_step(step)}-{token}"

    def prepare_folder(self, partial: Path) -> None:
        """Makes the folder of a partial checkpoint; any rank may be the first."""
        make_durable_folder(self.path)
        partial.mkdir(exist_ok=True)

    def image(self, plan: Skeleton, allocate: Callable[..., NDArray[np.uint8]], number: int) -> ShardImage:
        """Staging memory for this process's shard, the one of this number. Raises MemoryError, OSError, RunFailed."""
        return ShardImage(plan, allocate)

    def copy(self, shard: Path) -> None:
        """Called when a shard is durable; keeps it elsewhere, too, if this folder is to. Raises OSError."""

    def free_bytes(self, partial: Path) -> int:
        """Bytes that can still be written to a partial checkpoint."""
        free = os.statvfs(partial)
        return free.f_bavail * free.f_frsize

    def require_room(self, folder: Path, needed: int) -> None:
        """Raises RunFailed if fewer bytes are free."""
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
        """Makes a partial checkpoint, whose shards are durable, that of a step; its bytes. One process calls it.

        ``owners``: how many of the ranks have rank-local state, if not all.

        Raises DamagedCheckpoint if shards are not whole; or, if it ``looks_through`` them, do not make up all tensors.

        Order: manifest, names in the folder, fence, rename, name of the folder; each durable before the next.
        """
        texts, total = self._shards(partial, ranks)
        data = manifest_file.encode(step, owners or ranks, meta, texts)
        if looks_through and texts:
            manifest_file.parse(data, str(partial / MANIFEST_FILE))
        self.seal(partial, step, self._last_file, data)
        return total

    def seal(self, partial: Path, step: int, file: str, data: bytes) -> None:
        """Adds the last file to a partial checkpoint, which then is that of a step. Raises as ``commit`` does."""
        write_durably(partial / file, data, self.file_mode)
        sync_folder(partial)
        self.fence()
        target = self.folder(step)
        replaced = self.path / f"{REPLACED}{target.name}-{secrets.token_hex(4)}"
        if target.exists():
            os.rename(target, replaced)
            sync_folder(self.path)
        try:
            os.rename(partial, target)
        except OSError:  # a newer attempt has swept the partial checkpoint, and the one that is there is its own
            if replaced.exists() and not target.exists():
                os.rename(replaced, target)
            raise
        sync_folder(self.path)
        if replaced.exists():
            self._delete(replaced)

    def _shards(self, partial: Path, ranks: int) -> tuple[list[bytes], int]:
        """What a partial checkpoint's last file says of its shards, and their bytes. Raises DamagedCheckpoint."""
        found = [index_of(partial / shard_file(rank, ranks)) for rank in range(ranks)]
        return [text for text, _ in found], sum(num_bytes for _, num_bytes in found)

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, after the fence."""
        self.fence()
        self._delete(self.folder(step))

    def discard(self, partial: Path) -> None:
        """Deletes what is left of a checkpoint that was not committed."""
        if partial.is_dir():
            self._delete(partial)

    def put_aside(self, step: int, why: str) -> Path:
        """Renames a checkpoint to ``<why>-step-...`` so that it is never chosen again; its files are kept."""
        self.fence()
        aside = self.path / f"{why}-{name_of_step(step)}-{secrets.token_hex(4)}"
        os.rename(self.folder(step), aside)
        sync_folder(self.path)
        return aside

    def sweep(self) -> list[str]:
        """Removes what killed processes left; returns the names. One process calls it, before it lists checkpoints.

        A process of an older attempt that still writes finds its folder gone and cannot commit. One that is to sweep
        itself must not: the fence is asked before each removal.
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
                sync_folder(self.path)
            else:
                self._delete(entry)
        return [entry.name for entry in leftovers]

    def _delete(self, folder: Path) -> None:
        """Renames first, so that no half-deleted folder bears a checkpoint's name, not even after a power loss."""
        trash = folder
        if not folder.name.startswith(TRASH):
            trash = self.path / f"{TRASH}{folder.name.lstrip('.')}-{secrets.token_hex(4)}"
            os.rename(folder, trash)
            sync_folder(self.path)
        shutil.rmtree(trash, ignore_errors=True)  # what a file server still holds is swept at the next start


def index_of(path: Path) -> tuple[bytes, int]:
    """A shard's index, and the shard's size. Raises DamagedCheckpoint if it is not whole."""
    descriptor = open_regular(path)
    try:
        return shard_index.read_text(descriptor, path), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)

"""Checkpoints in a folder: a new one appears whole and durable, or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from hpctrain.checkpoint.files import listed, make_durable_folder, sync_folder, write_durably
from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format.layout import (
    MANIFEST_FILE,
    STEP_FOLDER,
    DamagedCheckpoint,
    Manifest,
    shard_file,
    step_folder,
)
from hpctrain.checkpoint.patience import patiently
from hpctrain.checkpoint.reading import Loaded, load_newest
from hpctrain.checkpoint.retention import Retention
from hpctrain.comm.group import Group
from hpctrain.errors import UserError

PARTIAL = ".partial-"
"""Prefix of a folder that is being written."""
TRASH = ".trash-"
"""Prefix of a folder that is being deleted."""
REPLACED = ".replaced-"
"""Prefix of a checkpoint that gives way to another of the same step."""

KEEP_ALL = Retention()


def no_fence() -> None:
    """Nobody else writes to the folder."""


class CheckpointStore:
    """A folder of checkpoints, ``step-<number>/`` each, for one process or for the ranks of a group.

    Example:
        >>> store = CheckpointStore("checkpoints")
        >>> store.save({"model/weight": np.ones((3, 4))}, meta={"epoch": 2}, step=100)  # doctest: +SKIP
        >>> loaded = store.load()  # doctest: +SKIP
        >>> loaded.step, loaded.meta, loaded.arrays["model/weight"]  # doctest: +SKIP

    Args:
        path: the folder; made with its parents when the first checkpoint is saved.
        keep: what to remove after a save; nothing by default.
        group: ranks that save and load together, each of which then calls ``save`` and ``load``.
        fence: called before each commit and each removal; raises Replaced where this process may no longer write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: Retention = KEEP_ALL,
        group: Group | None = None,
        fence: Callable[[], None] = no_fence,
    ) -> None:
        self.path = Path(path)
        self.keep = keep
        self.group = group or Group("alone")
        self.fence = fence
        self.saver: Any = None

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending. Whether they are sound is known after ``load`` or ``verify``.

        Raises:
            UnreadableCheckpoint, UserError: the folder cannot be listed.
        """
        names = set(patiently(lambda: listed(self.path)))
        found = {int(match[1]) for match in map(STEP_FOLDER.fullmatch, names) if match}
        return sorted(step for step in found if step_folder(step) in names)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is or will be."""
        return self.path / step_folder(step)

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint consists of. Raises DamagedCheckpoint, UnreadableCheckpoint, UserError; tries once."""
        return manifest_file.read(self.folder(step), step)

    def save(
        self,
        arrays: Mapping[str, ArrayLike],
        meta: Mapping[str, Any] | None = None,
        step: int | None = None,
        rank_arrays: Mapping[str, ArrayLike] | None = None,
    ) -> Path:
        """Writes a checkpoint and returns its folder when it is durable. Collective over the store's group.

        Args:
            arrays: the state by name, slashes making groups; equal on all ranks, each of which writes a part.
            meta: anything JSON can hold.
            step: number of the checkpoint; by default one more than the newest.
            rank_arrays: state that is each rank's own.

        Raises:
            UserError: names, types or ``meta`` cannot be stored.
            RunFailed: it could not be written (disk full, I/O error); older checkpoints are untouched.
            Replaced: a newer attempt has begun.
        """
        from hpctrain.checkpoint.saver import array_tensors, open_saver

        if self.saver is None:
            self.saver = open_saver(self)
        if step is None:
            step = self.group.broadcast(max(self.steps(), default=-1) + 1, "number the checkpoint")
        tensors = array_tensors(arrays, rank_arrays or {})
        self.saver.begin(tensors, step, dict(meta or {}))
        path = self.saver.finish().path_or_raise()
        self.saver.rest()
        return path

    def load(self, step: int | None = None) -> Loaded:
        """The newest sound checkpoint, or that of a step. Collective over the store's group.

        All bytes are verified before any is used. A rank reads a part of the shards and gets the rest from its peers.

        Raises:
            UserError: there is none.
            DamagedCheckpoint: none is sound; says why for each.
            UnreadableCheckpoint: one cannot be read now; nothing older is taken in its place.
        """
        steps = self.group.broadcast(self.steps() if self.group.rank == 0 else None, "list the checkpoints")
        if step is not None and step not in steps:
            raise UserError(f"{self.path} has no checkpoint of step {step}", f"choose one of {steps or '(none)'}")
        if not steps:
            raise UserError(f"{self.path} has no checkpoint", "save one first, or check the path")
        return load_newest(self.path, [step] if step is not None else steps[::-1], self.group)

    def close(self) -> None:
        """Releases staging memory and the thread of ``save``; the store stays usable."""
        if self.saver:
            self.saver.close()
        self.saver = None

    def partial(self, step: int, token: str) -> Path:
        """Folder in which a checkpoint is written before it is committed."""
        return self.path / f"{PARTIAL}{step_folder(step)}-{token}"

    def commit(self, partial: Path, step: int, ranks: int, meta: Mapping[str, Any]) -> int:
        """Makes a partial checkpoint, whose shards are durable, that of a step; its bytes. One process calls it.

        Order: manifest, names in the folder, fence, rename, name of the folder; each durable before the next.
        """
        texts, total = [], 0
        for rank in range(ranks):
            text, num_bytes = take_record(partial, shard_file(rank, ranks))
            texts.append(text)
            total += num_bytes
        write_durably(partial / MANIFEST_FILE, manifest_file.encode(step, ranks, meta, texts))
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
        return total

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, after the fence."""
        self.fence()
        self._delete(self.folder(step))

    def discard(self, partial: Path) -> None:
        """Deletes what is left of a checkpoint that was not committed."""
        if partial.is_dir():
            self._delete(partial)

    def put_aside(self, step: int, why: str) -> Path:
        """Renames a checkpoint to ``<why>-step-...`` so that it is never chosen again; nothing of it is deleted."""
        self.fence()
        aside = self.path / f"{why}-{step_folder(step)}-{secrets.token_hex(4)}"
        os.rename(self.folder(step), aside)
        sync_folder(self.path)
        return aside

    def sweep(self) -> list[str]:
        """Clears what killed processes left; returns the names. One process calls it, before it lists checkpoints.

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

    def prepare_folder(self, partial: Path) -> None:
        """Makes the folder of a partial checkpoint; any rank may be the first."""
        make_durable_folder(self.path)
        partial.mkdir(exist_ok=True)


def leave_record(partial: Path, file: str, text: bytes) -> None:
    """Leaves a shard's entry of the manifest beside it, for the committing rank."""
    (partial / f"{file}.entry").write_bytes(hashlib.sha256(text).hexdigest().encode() + text)


def take_record(partial: Path, file: str) -> tuple[bytes, int]:
    """A shard's entry, which is removed, and the shard's size. Raises DamagedCheckpoint where it is not whole."""
    path = partial / f"{file}.entry"
    record = path.read_bytes()
    digest, text = record[:64], record[64:]
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamagedCheckpoint(f"{path} is not what its rank wrote", "look for I/O errors on the ranks' nodes")
    path.unlink()
    return text, os.lstat(partial / file).st_size

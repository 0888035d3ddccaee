"""Saves and loads checkpoints of one process or of the ranks of a group; resumes from the newest sound one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from hpctrain.checkpoint.checkpoint_folder import CheckpointFolder
from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.format.shard import host_buffer
from hpctrain.checkpoint.object_state import restore
from hpctrain.checkpoint.reading import Loaded, Use, load_newest, open_checkpoint
from hpctrain.checkpoint.resume_compat import model_changes
from hpctrain.checkpoint.saver import Saver, array_tensors
from hpctrain.checkpoint.weight_files import MODEL
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.run.resolve_run import BEST
from hpctrain.system.array_types import Array, Bytes
from hpctrain.train.framework import StateSource
from hpctrain.train.stateful import HOOKS, STATE, Kept


class CheckpointStore(CheckpointFolder):
    """A folder of checkpoints, ``step-<number>/``, saved and loaded by one process or the ranks of a group.

    Example:
        >>> store = CheckpointStore("checkpoints")
        >>> store.save({"model/weight": np.ones((3, 4))}, meta={"epoch": 2}, step=100)  # doctest: +SKIP
        >>> loaded = store.load()  # doctest: +SKIP
        >>> loaded.step, loaded.meta, loaded.arrays["model/weight"]  # doctest: +SKIP

    Args:
        path: the folder; created with its parents when the first checkpoint is saved.
        keep: which checkpoints to keep after a save; by default all.
        group: ranks that save and load together; all of them call ``save`` and ``load``.
        fence: called before each commit and removal; raises Replaced if this process may no longer write.
        peers: data-parallel ranks (``World.data``) if models are partitioned over ranks of the group; rank-local state
            belongs to a rank of this group. By default the whole group.
        copies: ranks with the same rank-local state (``World.tensor``), of which the first writes it. By default only
            this rank.
        local: ranks whose files are in the same folder, if the group's files are spread over several nodes.
    """

    saver: Saver | None = None
    """Opened by ``save``."""

    def save(
        self,
        arrays: Mapping[str, ArrayLike],
        meta: Mapping[str, Any] | None = None,
        step: int | None = None,
        rank_arrays: Mapping[str, ArrayLike] | None = None,
    ) -> Path:
        """Write a checkpoint and return its folder once it is durable. Collective over the store's group.

        Args:
            arrays: replicated state by name, equal on all ranks, each of which writes a part; slashes create groups.
            meta: JSON values.
            step: number of the checkpoint; by default one more than the newest.
            rank_arrays: rank-local state by name.

        Raises:
            UserError: names, types or ``meta`` cannot be stored.
            RunFailed: the checkpoint could not be written (disk full, I/O error); older checkpoints are untouched.
            Replaced: a newer attempt has begun.
        """
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
        """Load the newest sound checkpoint, or that of ``step``, into memory. Collective over the store's group.

        All bytes are verified before any is used.

        Raises:
            UserError: there is no checkpoint.
            DamagedCheckpoint: no checkpoint is sound; gives the reason for each.
            UnreadableCheckpoint: a checkpoint cannot be read now; no older one is loaded in its place.
        """
        return load_newest(self.candidates(step), self.group, self.peers)

    def load_into(self, use: Use, step: int | str | None = None, init_from: str | None = None) -> Loaded:
        """Load a checkpoint into memory that the caller already has. Collective over the store's group.

        Args:
            use: called with the checkpoint on all ranks. Its ``arrays`` are SavedArrays, each of which is read and
                verified on access, whole or in part. It returns the arrays that the result should hold. It may be
                called again: with the same checkpoint if a rank cannot read it directly, and with an older one, which
                has all of the same tensors, if a rank finds damage.
            step: step of the checkpoint; by default the newest sound one.
            init_from: the source of frozen weights that checkpoints left out, if it is no longer where it was.

        Raises:
            UserError, DamagedCheckpoint, UnreadableCheckpoint: as ``load``, and what ``use`` raises.
        """
        return load_newest(self.candidates(step), self.group, self.peers, use, init_from=init_from)

    @contextmanager
    def opened(self, step: int) -> Iterator[Loaded]:
        """Open a step's checkpoint for one process; each array is read and verified on access.

        Raises:
            DamagedCheckpoint, UnreadableCheckpoint, UserError: it cannot be read; also raised on access to arrays.
        """
        with self.whole(step), open_checkpoint(self.path, step) as loaded:
            yield loaded

    def candidates(self, step: int | str | None) -> list[Path]:
        """Folders to try, in order; ``step`` may be ``best``. Collective. Raises UserError if there are none."""
        steps: list[int] = self.group.broadcast(self.steps() if self.group.rank == 0 else None, "list the checkpoints")
        if not steps:
            raise UserError(f"{self.path} has no checkpoint", "train first, or check the path")
        if step == BEST:
            step = self.group.broadcast(self.best() if self.group.rank == 0 else None, "find the best checkpoint")
            if step is None:
                raise no_best(str(self.path))
        if step is not None and step not in steps:
            fix = f"choose one of {', '.join(map(str, steps))}"
            raise UserError(f"{self.path} has no checkpoint of step {step}", fix)
        return [self.folder(each) for each in ([int(step)] if step is not None else steps[::-1])]

    def close(self) -> None:
        """Release staging memory and the thread of ``save``; the store stays usable."""
        if self.saver:
            self.saver.close()
        self.saver = None


def no_best(where: str) -> UserError:
    """The error that no checkpoint is marked best."""
    return UserError(f"{where} has no best checkpoint", "set checkpoint.best_metric in the run, or give a step")


def open_saver(
    store: CheckpointStore,
    writers: Sequence[int] | None = None,
    allocate: Callable[[int], Bytes] = host_buffer,
) -> Saver:
    """Create a saver for the ranks of a store's group. Collective.

    Args:
        store: where to save.
        writers: ranks that split the writing of replicated state; by default all.
        allocate: returns contiguous uint8 staging memory of a number of bytes.
    """
    token = store.group.broadcast(secrets.token_hex(4), "name the partial checkpoints")
    among = range(store.group.size) if writers is None else writers
    return Saver(store, among, token, allocate)


def load_framework(framework: StateSource, loaded: Loaded) -> dict[str, Array]:
    """Load a framework's arrays, one at a time in memory, and return those of hooks and other objects."""
    framework.load(loaded.arrays)
    return {name: loaded.arrays[name] for name in loaded.arrays if name.startswith((HOOKS, STATE))}


def compare_model(
    framework: StateSource, loaded: Loaded, everyone: Group | None = None, accepted: Sequence[str] = ()
) -> list[str]:
    """Compare the names of a model's tensors with a checkpoint's, after loading. Collective over ``everyone``.

    A rank has none of other stages' tensors. Returns sentences on what
    was accepted; raises UserError. See ``resume_compat.model_changes``.
    """
    own = {tensor.name.removeprefix(MODEL) for tensor in framework.state() if tensor.name.startswith(MODEL)}
    saved = {name.removeprefix(MODEL) for name in loaded.dtypes if name.startswith(MODEL)}
    differ = [sorted(saved - own), sorted(own - saved)]  # for most plans no names at all
    everywhere = (everyone or Group("alone")).allgather(differ, "compare the tensors of the model")
    lacking = set.intersection(*(set(lacks) for lacks, _ in everywhere))
    new = {name for _, more in everywhere for name in more}
    return model_changes(saved, (saved - lacking) | new, str(loaded.path), accepted)


def load_weights(
    framework: StateSource,
    store: CheckpointStore,
    step: int | str | None = None,
    state: Sequence[Kept] = (),
    everyone: Group | None = None,
    accepted: Sequence[str] = (),
    init_from: str | None = None,
) -> Loaded:
    """Load a checkpoint, by default the newest sound one, to evaluate or predict. Collective; changes no files.

    State that only the task or only the checkpoint has is ignored.

    Args:
        framework: the model, or a pipeline stage of it.
        store: the checkpoints.
        step: which one; ``best`` for the best.
        state: objects of the task.
        everyone: all ranks.
        accepted: see ``resume_compat.model_changes``.
        init_from: see ``CheckpointStore.load_into``.

    Raises:
        UserError: there is no checkpoint, or it is of a different model.
        DamagedCheckpoint: it is damaged.
    """
    loaded = store.load_into(lambda loaded: load_framework(framework, loaded), step, init_from)
    compare_model(framework, loaded, everyone, accepted)
    restore(state, loaded, framework.facts.leaves, store.peers, accepted=["state"])
    return loaded


def best_steps(store: CheckpointStore) -> set[int]:
    """The newest checkpoint marked best, and newer ones that cannot be read and may be it; empty except on rank 0."""
    found: set[int] = set()
    for step in reversed(store.steps()) if store.group.rank == 0 else ():
        try:
            if store.manifest(step).meta.get("best"):
                return found | {step}
        except DamagedCheckpoint:
            continue
        except (UnreadableCheckpoint, UserError):
            found.add(step)
    return found

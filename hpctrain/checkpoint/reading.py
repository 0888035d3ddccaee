"""Loads a checkpoint in one process or on many ranks: they verify it, agree on it, and read what each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.checkpoint_folder import CheckpointFolder
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.layout import ITEM_TYPES, Manifest, Shard, StoredPiece, TensorSpec
from hpctrain.checkpoint.format.shard import view_of
from hpctrain.checkpoint.format.shard_reading import ShardFiles, check_rest, check_shard, read_shard
from hpctrain.checkpoint.frozen import FROZEN, FrozenRecord, FrozenSource
from hpctrain.checkpoint.lora import Weights
from hpctrain.checkpoint.read_retry import FINAL, read_among, retry_read
from hpctrain.checkpoint.weight_files import MODEL, join_weights, open_weight_files
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.run import resolve_run
from hpctrain.run.folder import name_of_step, step_named
from hpctrain.system.array_types import Array, Bytes
from hpctrain.system.user_errors import own_line, words
from hpctrain.train.saved_arrays import HeldArrays, SavedArrays, merge, require_inside
from hpctrain.train.stateful import STATE
from hpctrain.train.tree import STRUCTURE

RANDOM = "rng/"
"""Prefix of random states, which are not used with a different number of ranks."""


@dataclass(frozen=True)
class NotUsed:
    """A checkpoint that was not used."""

    step: int
    reason: str
    path: Path
    """Its folder."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's contents, verified before use."""

    step: int
    """Step of the checkpoint."""
    path: Path
    """Its folder."""
    ranks: int
    """Number of ranks with rank-local state when it was saved: all, or those of the data-parallel group."""
    meta: dict[str, Any]
    """What was saved as ``meta``."""
    arrays: SavedArrays
    """Arrays by name; bfloat16 as uint16. If the number of ranks differs from the saved one, random states of ranks are
    omitted, and other rank-local floating-point state is averaged."""
    dtypes: dict[str, str]
    """Logical types by name."""
    rejected: tuple[NotUsed, ...] = ()
    """Newer checkpoints that are damaged, newest first."""
    of_ranks: Mapping[str, Mapping[int, Array]] = field(default_factory=dict)
    """The task's rank-local state by name and saved rank, if the number of ranks differs from the saved one."""
    source: FrozenSource | None = None
    """Source of the frozen weights that it left out, which ``arrays`` reads on access."""


Use = Callable[[Loaded], Mapping[str, Array]]
"""use(loaded) reads what it needs from a checkpoint whose arrays are read on access, and returns the arrays to keep."""


def load_newest(
    folders: Sequence[Path],
    group: Group,
    peers: Group,
    use: Use | None = None,
    prepare: Callable[[Path], None] = lambda folder: None,
    init_from: str | None = None,
) -> Loaded:
    """Load the first sound checkpoint among these. Collective.

    Args:
        folders: candidate folders in order, each named after its step.
        group: ranks that load together.
        peers: ranks of the group with rank-local state; see ``CheckpointStore``.
        use: called on all ranks with the checkpoint, whose arrays each rank reads and verifies on access. It is called
            again with the same checkpoint if a rank could not read it, or with an older one, which replaces all arrays
            read so far, if a rank found damage. By default all arrays are kept: each rank reads and verifies every
            group.size-th shard and sends it to the others.
        prepare: called on all ranks before a folder is read; raises DamagedCheckpoint, on all, to skip it.
        init_from: the source of frozen weights that checkpoints left out, if it is no longer where it was.

    Raises:
        DamagedCheckpoint: no candidate is sound.
        UnreadableCheckpoint: a candidate cannot be read now, so it is unknown whether it is sound.
    """
    rejected: list[NotUsed] = []
    taken: layout.Manifest | None = None
    """Manifest of a damaged checkpoint of which ``use`` may have read parts."""
    fix = "restore the folder from a backup, or begin again with --fresh"
    for folder, older in zip_longest(folders, folders[1:]):
        step = step_of(folder)
        try:
            prepare(folder)
            manifest = read_manifest(folder, step, group)
            if taken and not replaces(manifest, taken):
                fix = "rename the folders of the damaged ones, then run the same command again"
                break
            candidate = LoadCandidate(folder, manifest, group, peers, tuple(rejected), init_from)
            if use is None:
                return candidate.shared()
            is_replaced = older is None or replaced_by(older, manifest, group)
            own = candidate.own_state(check_rest if is_replaced else check_shard)
            taken = manifest
            return candidate.read_by_each(own, use)
        except layout.DamagedCheckpoint as error:
            rejected.append(NotUsed(step, error.what, folder))
    reasons = "; ".join(found.reason for found in rejected)
    raise layout.DamagedCheckpoint(f"{folders[-1].parent} has no intact checkpoint: {reasons}", fix)


Arrays = dict[str, Array]
"""Arrays by name."""
OfRanks = dict[str, dict[int, Array]]
"""Rank-local arrays by name and rank."""


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    step = step_named(folder.name)
    assert step is not None, "folders of checkpoints have their names"
    return step


def replaced_by(older: Path, manifest: layout.Manifest, group: Group) -> bool:
    """Whether the next older checkpoint has all tensors of this one, should it be damaged. Collective."""
    found = False
    if group.rank == 0:
        with suppress(layout.DamagedCheckpoint, layout.UnreadableCheckpoint, UserError):
            found = replaces(manifest_file.read(older, step_of(older)), manifest)
    return bool(group.broadcast(found, "compare two checkpoints"))


def replaces(manifest: layout.Manifest, other: layout.Manifest) -> bool:
    """Whether a checkpoint has all tensors of the other one and was saved by the same number of ranks."""
    return manifest.ranks == other.ranks and manifest.tensors().keys() >= other.tensors().keys()


@dataclass(frozen=True)
class OwnState:
    """Saved rank-local state, prepared for a different number of ranks."""

    merged: Arrays
    """One value per name."""
    of_ranks: OfRanks
    """The task's rank-local state of each saved rank."""


@contextmanager
def open_checkpoint(path: Path, step: int) -> Iterator[Loaded]:
    """Open a checkpoint in one process: each array is read, with retries, and verified on access.

    The rest of the files is verified at once.

    Raises:
        DamagedCheckpoint, UnreadableCheckpoint, UserError: as ``read_among``; also on access to arrays.
    """
    folder, alone = path / name_of_step(step), Group("alone")
    manifest = read_manifest(folder, step, alone)
    candidate = LoadCandidate(folder, manifest, alone, alone)
    own = candidate.own_state(check_rest)
    with closing(LoadedArrays(folder, manifest, candidate.own_rank, own.merged, retry_read)) as contents:
        yield candidate.loaded(contents, own.of_ranks)


def open_source(path: str, stack: ExitStack) -> Weights:
    """Open the weights of a folder of Hugging Face or DCP, a file or a checkpoint, until the stack is closed."""
    if weights := open_weight_files(path):
        return weights
    folder, step = resolve_run.checkpoints(path)
    loaded = stack.enter_context(
        open_checkpoint(folder, CheckpointFolder(folder).steps()[-1] if step is None else step)
    )
    return join_weights([Weights(loaded.arrays, loaded.dtypes)], MODEL)


def read_manifest(folder: Path, step: int, group: Group) -> layout.Manifest:
    """Read the manifest on one rank and broadcast it. Collective. Raises as ``read_among`` does."""
    what = f"read the manifest of {folder.name}"
    held, (holder,) = read_among(group, 1, lambda _: manifest_file.read_with_bytes(folder, step), what)
    data, manifest = held.get(0, (b"", None))
    received = np.empty(group.broadcast(len(data), what, root=holder), dtype=np.uint8)
    received[:] = np.frombuffer(data, np.uint8) if manifest else 0
    group.broadcast_array(received, what, root=holder)
    return manifest or manifest_file.parse_of_step(received.tobytes(), folder / layout.MANIFEST_FILE, step)


Check = Callable[[Path, layout.Shard], None]
"""check(folder, shard) verifies a shard; raises DamagedCheckpoint, UnreadableCheckpoint or UserError."""


@dataclass(frozen=True)
class LoadCandidate:
    """A checkpoint that ranks load together if it turns out to be sound."""

    folder: Path
    manifest: layout.Manifest
    group: Group
    """Ranks that load together."""
    peers: Group
    """Ranks of the group with rank-local state."""
    rejected: tuple[NotUsed, ...] = ()
    """Newer, damaged checkpoints, newest first."""
    init_from: str | None = None
    """Source of frozen weights that it left out; None if it is where it was."""

    @property
    def own_rank(self) -> int | None:
        """The saved rank whose rank-local state this rank loads; None if the number of ranks differs."""
        return self.peers.rank if self.manifest.ranks == self.peers.size else None

    def loaded(self, arrays: SavedArrays, of_ranks: OfRanks) -> Loaded:
        """The Loaded with these arrays, and the frozen weights that it left out."""
        saved, source = self.manifest, None
        dtypes = {spec.name: spec.dtype for spec in saved.tensors().values()}
        if FROZEN in saved.meta:
            record = FrozenRecord.of(saved.meta, self.folder)
            share = (self.group.rank, self.group.size)
            source = FrozenSource(record.moved(self.init_from), share, open_source)
            arrays, dtypes = source.complete(arrays), source.dtypes() | dtypes
        return Loaded(saved.step, self.folder, saved.ranks, saved.meta, arrays, dtypes, self.rejected, of_ranks, source)

    def own_state(self, check: Check) -> OwnState:
        """Check each shard on one of the ranks, and gather the saved rank-local state. Collective.

        Nothing is gathered if the number of ranks is unchanged. Raises as ``read_among`` does.
        """
        shards = self.manifest.shards
        kept = [own_pieces(shard) if self.own_rank is None else [] for shard in shards]

        def look(index: int) -> Bytes:
            check(self.folder, shards[index])
            with closing(ShardFiles(self.folder)) as files:
                values = [files.read_whole(shards[index], stored) for stored in kept[index]]
            return np.concatenate([np.empty(0, np.uint8), *(value.reshape(-1).view(np.uint8) for value in values)])

        held, holders = read_among(self.group, len(shards), look, f"verify {self.folder.name}")
        of_ranks: OfRanks = {}
        for index, pieces in enumerate(kept):
            if pieces:
                size = sum(stored.piece.num_bytes for stored in pieces)
                image = held[index] if index in held else np.empty(size, np.uint8)
                self.group.broadcast_array(image, f"send ranks' own state of {shards[index].file}", holders[index])
                position = 0
                for stored in pieces:
                    tensor = stored.piece.tensor
                    assert tensor.rank is not None, "only ranks' own pieces are kept"
                    of_ranks.setdefault(tensor.name, {})[tensor.rank] = view_of(image, stored.piece, position)
                    position += stored.piece.num_bytes
        return own_state_of(of_ranks, self.peers.rank, self.manifest)

    def read_by_each(self, own: OwnState, use: Use) -> Loaded:
        """Let each rank read what it needs; if one cannot, ranks exchange all shards instead. Collective."""
        mine: Exception | None = None
        problem: tuple[str, str, str] | None = None
        kept: Mapping[str, Array] = {}
        with closing(LoadedArrays(self.folder, self.manifest, self.own_rank, own.merged)) as contents:
            view = self.loaded(contents, own.of_ranks)
            try:
                if view.source:
                    view.source.verify()
                kept = use(view)
            except (*FINAL, layout.UnreadableCheckpoint) as error:
                mine = error
                problem = (type(error).__name__, error.what, error.fix)
            except Exception as error:  # from the caller's code: other ranks must not wait for this one
                said = f"{type(error).__name__}: {words(error)}{own_line(error)}"
                what = f"rank {self.group.rank} failed while it loaded {self.folder.name}: {said}"
                mine = error
                problem = (UserError.__name__, what, "correct what that rank does with the checkpoint")
        failed = [each for each in self.group.allgather(problem, f"read {self.folder.name}") if each]
        if not failed:
            return replace(view, arrays=HeldArrays(kept))
        for name, what, _ in failed:
            if name == layout.DamagedCheckpoint.__name__:
                raise layout.DamagedCheckpoint(what)
        for name, what, fix in failed:
            if name != layout.UnreadableCheckpoint.__name__:
                raise mine if mine and not isinstance(mine, layout.UnreadableCheckpoint) else UserError(what, fix)
        view = self.shared()
        return replace(view, arrays=HeldArrays(use(view)))

    def shared(self) -> Loaded:
        """Load all arrays: each shard is read by a rank that can, and broadcast to the others. Collective.

        Raises as ``read_among`` does.
        """
        shards, what = self.manifest.shards, f"verify {self.folder.name}"
        images, holders = read_among(
            self.group, len(shards), lambda index: read_shard(self.folder, shards[index]), what
        )
        arrays: Arrays = {}
        of_ranks: OfRanks = {}
        for index, shard in enumerate(shards):
            image = images[index] if index in images else np.empty(shard.num_bytes, dtype=np.uint8)
            self.group.broadcast_array(image, f"send {shard.file}", root=holders[index])
            take(shard, image, arrays, of_ranks, self.own_rank)
        own = own_state_of(of_ranks, self.peers.rank, self.manifest)
        return self.loaded(HeldArrays(arrays | own.merged), own.of_ranks)


def own_pieces(shard: layout.Shard) -> list[layout.StoredPiece]:
    """The rank-local pieces of a shard, without random states."""
    return [
        stored
        for stored in shard.pieces
        if stored.piece.tensor.rank is not None and not stored.piece.tensor.name.startswith(RANDOM)
    ]


def own_state_of(of_ranks: OfRanks, rank: int, saved: Manifest) -> OwnState:
    """The rank-local state that a rank loads if the number of ranks has changed."""
    merged: Arrays = {}
    dtypes = {spec.name: spec.dtype for spec in saved.tensors().values()}
    for name, values in of_ranks.items():
        if not name.startswith(STATE):
            fit = same(of_ranks.get(f"{name.rpartition('/')[0]}/{STRUCTURE}", {}))
            of_one = values[sorted(values)[rank % len(values)]]
            merged[name] = merge([values[each] for each in sorted(values)], rank, dtypes[name]) if fit else of_one
    return OwnState(merged, {name: values for name, values in of_ranks.items() if name.startswith(STATE)})


def same(values: Mapping[int, Array]) -> bool:
    """Whether all ranks' values are bitwise identical; values whose structure is can be merged."""
    return len({value.tobytes() for value in values.values()}) < 2


def take(shard: layout.Shard, image: Bytes, arrays: Arrays, of_ranks: OfRanks, rank: int | None) -> None:
    """Add replicated values and those of ``rank`` to ``arrays``; without ``rank``, rank-local ones to ``of_ranks``."""
    for stored in shard.pieces:
        piece, tensor = stored.piece, stored.piece.tensor
        view = view_of(image, piece, stored.offset)
        if tensor.rank is None and piece.shape != tensor.shape:
            if tensor.name not in arrays:
                arrays[tensor.name] = np.empty(tensor.shape, layout.ITEM_TYPES[tensor.dtype])
            arrays[tensor.name][piece.box.index] = view
        elif tensor.rank is None or tensor.rank == rank:
            arrays[tensor.name] = view
        elif rank is None and not tensor.name.startswith(RANDOM):
            of_ranks.setdefault(tensor.name, {})[tensor.rank] = view.copy()


class LoadedArrays(SavedArrays):
    """A checkpoint's arrays by name, bfloat16 as uint16; each access reads the file again. Close it after use.

    Args:
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        rank: the rank whose rank-local values to use; None to use ``merged``.
        merged: rank-local tensors, merged over all saved ranks.
        retry: calls a function that reads one tensor, and may retry it if it raises UnreadableCheckpoint.

    Access raises DamagedCheckpoint, UnreadableCheckpoint and UserError; see ``ShardFiles.read``.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        rank: int | None,
        merged: Mapping[str, Array],
        retry: Callable[[Callable[[], Array]], Array] = lambda read: read(),
    ) -> None:
        self.files = ShardFiles(folder)
        self.merged = merged
        self.retry = retry
        self.pieces: dict[str, list[tuple[Shard, StoredPiece]]] = {}
        """Stored pieces by tensor name."""
        self.names: dict[str, TensorSpec] = {}
        """All tensors by name, in the order of the shards."""
        super().__init__(self.names)
        for shard in manifest.shards:
            for stored in shard.pieces:
                tensor = stored.piece.tensor
                if tensor.rank is None or tensor.rank == rank:
                    self.pieces.setdefault(tensor.name, []).append((shard, stored))
                    self.names[tensor.name] = tensor
                elif tensor.name in merged:
                    self.names.setdefault(tensor.name, tensor)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.merged[name].shape if name in self.merged else self.names[name].shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return self.merged[name].dtype if name in self.merged else ITEM_TYPES[self.names[name].dtype]

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        require_inside(name, begin, shape, self.shape_of(name))
        wanted = Box(tuple(begin), tuple(shape))
        return self.merged[name][wanted.index] if name in self.merged else self._read(name, wanted)

    def close(self) -> None:
        """Close the files; the next access opens them again."""
        self.files.close()

    def _read(self, name: str, wanted: Box) -> Array:
        return self.retry(lambda: self._read_once(name, wanted))

    def _read_once(self, name: str, wanted: Box) -> Array:
        out = self.files.allocate(wanted.shape, self.names[name].dtype)
        for shard, stored in self.pieces[name]:
            self.files.read(shard, stored, wanted, out)
        return out

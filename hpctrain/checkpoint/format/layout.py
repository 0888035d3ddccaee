"""Types of the checkpoint format: item types, tensors, pieces, shards, manifest. See docs/checkpoint-format.md."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hpctrain.checkpoint.format.boxes import Box, everything
from hpctrain.errors import Code, RunFailed, UserError
from hpctrain.system.array_types import Array
from hpctrain.train.saved_arrays import items_of, numbers_of

FORMAT = "hpctrain-checkpoint"
VERSION = 2
MANIFEST_FILE = "manifest.json"
TENSOR_NAME = re.compile(r"[^/\x00-\x1f\x7f\ud800-\udfff]+(/[^/\x00-\x1f\x7f\ud800-\udfff]+)*")
MAX_NAME = 1000
MAX_DIMENSIONS = 32
"""HDF5's limit."""
MAX_BYTES = 2**56
"""Limit on a tensor or shard, far above real sizes and far below values whose sums overflow 64 bits."""

NUMBERS = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
ITEM_TYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in ["bool", *NUMBERS.split()]}
ITEM_TYPES["bfloat16"] = np.dtype("<u2")
"""Item type in the file by logical name. HDF5 has no bfloat16, so its bits are stored as uint16."""


class DamagedCheckpoint(RunFailed):
    """A checkpoint is missing parts or differs from what was written; it must not be used."""

    code = Code.DAMAGED_CHECKPOINT

    def __init__(self, what: str, fix: str = "use an older checkpoint; `hpctrain ckpt ls` shows what there is") -> None:
        super().__init__(what, fix)


class UnreadableCheckpoint(RunFailed):
    """A checkpoint cannot be read now. It may be intact, so it is left in place."""

    code = Code.UNREADABLE_CHECKPOINT

    def __init__(
        self, what: str, fix: str = "look for file-system errors on the hosts, then run the same command again"
    ) -> None:
        super().__init__(what, fix)


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor of the state. Rows run along its first axis; a scalar is one row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Key of ITEM_TYPES."""
    rank: int | None = None
    """The rank to which it is local; None if it is not rank-local."""

    @property
    def rows(self) -> int:
        """Length of the first axis."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * ITEM_TYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def largest_bytes(self) -> int:
        """Bytes without axes of length 0, which is what NumPy checks against the address range."""
        return math.prod(filter(None, self.shape)) * ITEM_TYPES[self.dtype].itemsize

    @property
    def key(self) -> tuple[str, int | None]:
        """Identifies it among the tensors of a checkpoint."""
        return self.name, self.rank


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor in a shard, stored as one contiguous HDF5 dataset."""

    tensor: TensorSpec
    box: Box
    """Its box in the tensor."""
    dataset: str = ""
    """Name of the dataset if it differs from the tensor's, because the shard holds several pieces of the tensor."""

    @property
    def path(self) -> str:
        """Name of the dataset."""
        return self.dataset or self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dataset."""
        return self.box.shape

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the dataset."""
        return self.box.size * ITEM_TYPES[self.tensor.dtype].itemsize


def rows_of(tensor: TensorSpec, first: int, count: int) -> TensorPiece:
    """A piece of consecutive rows of a tensor; for a scalar, all of it."""
    if not tensor.shape:
        return whole_tensor(tensor)
    return TensorPiece(tensor, Box((first, *(0,) * (len(tensor.shape) - 1)), (count, *tensor.shape[1:])))


def named_apart(pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    """Give pieces in a shard unique dataset names: several pieces of a tensor are named by their first index."""
    count = Counter(piece.tensor.name for piece in pieces)
    return [
        replace(piece, dataset=f"{piece.tensor.name}{list(piece.box.begin)}") if count[piece.tensor.name] > 1 else piece
        for piece in pieces
    ]


def whole_tensor(tensor: TensorSpec) -> TensorPiece:
    """A piece that is a whole tensor."""
    return TensorPiece(tensor, everything(tensor.shape))


@dataclass(frozen=True)
class StoredPiece:
    """A piece with its offset in the shard and the CRC-32 of each of its blocks."""

    piece: TensorPiece
    offset: int
    block_bytes: int
    """Size of each block but the last; a multiple of every item size."""
    crc32: tuple[int, ...] | None
    """None for files of other formats, which have no checksums."""


@dataclass(frozen=True)
class Shard:
    """One file: HDF5 up to ``hdf5_bytes``, followed by the shard's index."""

    file: str
    num_bytes: int
    hdf5_bytes: int
    crc32: int
    """CRC-32 of the concatenated HDF5 bytes between the pieces."""
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    ranks: int
    """Number of ranks with rank-local state when it was saved."""
    shards: tuple[Shard, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    def tensors(self) -> dict[tuple[str, int | None], TensorSpec]:
        """Every tensor once, by name and rank, in the order of the shards."""
        return {stored.piece.tensor.key: stored.piece.tensor for shard in self.shards for stored in shard.pieces}


def shard_file(index: int, count: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}-of-{count:05d}.h5"


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raise UserError unless one HDF5 file can store these tensors under their names."""
    datasets = {tensor.name for tensor in tensors}
    if len(datasets) != len(tensors):
        raise UserError("two tensors of the state have the same name", "give every tensor its own name")
    for tensor in tensors:
        problem = name_problem(tensor.name)
        if tensor.dtype not in ITEM_TYPES:
            problem = f"has the type {tensor.dtype}; a checkpoint holds {', '.join(ITEM_TYPES)}"
        elif len(tensor.shape) > MAX_DIMENSIONS:
            problem = f"has {len(tensor.shape)} dimensions; HDF5 holds {MAX_DIMENSIONS}"
        parents = parents_of(tensor.name) & datasets
        if parents:
            problem = f"is below {min(parents)}, which is a tensor itself"
        if problem:
            raise UserError(
                f"tensor {tensor.name!r} {problem}",
                "rename or convert it, or leave it out: register_buffer(..., persistent=False)",
            )


def name_problem(name: str) -> str | None:
    """Why a name cannot be a dataset's path, or None."""
    if not TENSOR_NAME.fullmatch(name) or len(name) > MAX_NAME or {".", ".."} & set(name.split("/")):
        return f"is not a name: up to {MAX_NAME} printable characters, parts joined by '/'"
    return None


def parents_of(name: str) -> set[str]:
    """The groups in a dataset's path."""
    parts = name.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def convert_values(array: Array, dtype: str, wanted: str) -> Array:
    """Convert an array between logical floating-point types; values are rounded if the new type is narrower."""
    return array if dtype == wanted else items_of(numbers_of(array, dtype), wanted)


SPLIT_BYTES = 1 << 20
"""Tensors of at least this size are split by rows; smaller ones go to one writer."""
MOST_TILES = 8
"""Tiles per tensor at most, so that 2, 4 or 8 tensor-parallel ranks can each read only their own part."""
LEAST_TILE_BYTES = 1 << 15
"""Minimum tile size, about 100 times the size of a tile's entry in the index, which every reader reads."""
MOST_CRUMBS = 8
"""Limit on a tile's pieces: with very many writers, the index could otherwise become larger than the tensor."""


def partition(tensors: Sequence[TensorSpec], num_writers: int) -> list[list[TensorPiece]]:
    """Split the tensors' bytes evenly, in order: writer w gets the w-th list of pieces.

    Every rank computes the same result from the same tensors, without communication. A part differs from the mean by at
    most SPLIT_BYTES or one row at each end.
    """
    sizes = [tensor.num_bytes for tensor in tensors]
    ends, total = list(accumulate(sizes)), sum(sizes)
    cuts = [(0, 0)]
    cuts += [cut(tensors, ends, total * writer // num_writers) for writer in range(1, num_writers)]
    cuts.append((len(tensors), 0))
    return [pieces_between(tensors, first, last) for first, last in pairwise(cuts)]


def cut(tensors: Sequence[TensorSpec], ends: Sequence[int], target: int) -> tuple[int, int]:
    """(tensor, row) before which to cut, closest to a position in the tensors' bytes."""
    index = bisect_right(ends, target)
    if index == len(tensors):
        return index, 0
    tensor = tensors[index]
    into = target - (ends[index] - tensor.num_bytes)
    if tensor.num_bytes >= SPLIT_BYTES:
        row = (into + tensor.row_bytes // 2) // tensor.row_bytes
        return (index, row) if row < tensor.rows else (index + 1, 0)
    return (index, 0) if 2 * into < tensor.num_bytes else (index + 1, 0)


def pieces_between(tensors: Sequence[TensorSpec], first: tuple[int, int], last: tuple[int, int]) -> list[TensorPiece]:
    """The pieces from one cut to the next."""
    pieces = []
    for index in range(first[0], min(last[0] + 1, len(tensors))):
        begin = first[1] if index == first[0] else 0
        end = last[1] if index == last[0] else tensors[index].rows
        empty = tensors[index].rows == 0 and index < last[0]
        if end > begin or empty:
            pieces.append(rows_of(tensors[index], begin, end - begin))
    return pieces


def tiles(piece: TensorPiece, axis: int, parts: int) -> list[TensorPiece]:
    """Split a piece at fixed positions of its tensor, which do not depend on the part that a rank has.

    Args:
        piece: the piece to split.
        axis: the axis along which such layers are partitioned over tensor-parallel ranks.
        parts: number of equal parts that are partitioned separately, such as 3 for a fused QKV layer.
    """
    shape = piece.tensor.shape
    count = math.gcd(MOST_TILES * parts, *shape[axis : axis + 1])
    least = LEAST_TILE_BYTES // MOST_CRUMBS if axis else 0  # every writer's rows have some of all columns
    while count > 1 and (piece.tensor.num_bytes < count * LEAST_TILE_BYTES or piece.num_bytes < count * least):
        count //= 2
    if axis >= len(shape) or count == 1:
        return [piece]
    width = shape[axis] // count
    first = piece.box.begin[axis] // width
    last = -(-piece.box.end[axis] // width)
    size = (*shape[:axis], width, *shape[axis + 1 :])
    begins = (tuple(at * width * (each == axis) for each in range(len(shape))) for at in range(first, last))
    return [replace(piece, box=piece.box.overlap(Box(begin, size))) for begin in begins]

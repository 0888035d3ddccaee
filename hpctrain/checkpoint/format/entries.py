"""What the entries of a tensor in a manifest have in common in all versions of the format."""

from __future__ import annotations

from typing import Any

from hpctrain.checkpoint.format.layout import (
    ITEM_TYPES,
    MAX_BYTES,
    MAX_DIMENSIONS,
    DamagedCheckpoint,
    Shard,
    TensorSpec,
    name_problem,
)
from hpctrain.checkpoint.format.strict_json import Reader

KEYS = ("name", "dtype", "shape", "rank", "offset")


def tensor_of(value: Any, where: str) -> TensorSpec:
    """The tensor of an entry. Written for speed: there may be many thousands."""
    problem = tensor_problem(value)
    if problem:
        raise DamagedCheckpoint(f"{where}: {problem}")
    tensor = TensorSpec(value["name"], tuple(value["shape"]), value["dtype"], value["rank"])
    if tensor.largest_bytes > MAX_BYTES:
        raise DamagedCheckpoint(f"{where}: {tensor.name} cannot have the shape {tensor.shape}")
    return tensor


def tensor_problem(value: Any) -> str | None:
    """Why a value is not a tensor's entry, or None."""
    if type(value) is not dict:
        return "it is not an object"
    name, dtype, shape, rank, offset = map(value.get, KEYS)
    if type(name) is not str or name_problem(name):
        return f"{str(name)[:100]!r} is not a name"
    if type(dtype) is not str or dtype not in ITEM_TYPES:
        return f"{name} has the unknown type {str(dtype)[:50]}"
    if not are_counts(shape) or len(value["shape"]) > MAX_DIMENSIONS:
        return f"{name} has the shape {str(shape)[:100]}"
    if "rank" not in value or not (rank is None or is_count(rank)):
        return f"{name} belongs to rank {str(rank)[:50]}"
    return None if is_count(offset) else f"{name} begins at {str(offset)[:50]}"


def is_count(value: Any) -> bool:
    """Whether a value is a whole number within reason."""
    return type(value) is int and 0 <= value <= MAX_BYTES


def are_counts(value: Any) -> bool:
    """Whether a value is a list of such numbers."""
    return type(value) is list and all(map(is_count, value))


def require_room(shard: Shard, reader: Reader) -> None:
    """Raises DamagedCheckpoint unless the pieces lie within the file and apart from each other."""
    position = 0
    for stored in sorted(shard.pieces, key=lambda stored: stored.offset):
        if stored.piece.num_bytes and stored.offset < position:
            reader.fail(f"the bytes of {stored.piece.tensor.name} overlap others")
        position = max(position, stored.offset + stored.piece.num_bytes)
    if position > shard.hdf5_bytes:
        reader.fail("a tensor reaches beyond the end of the file")

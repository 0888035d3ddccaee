"""The index of a shard: the pieces in its file, their offsets, and all checksums.

It is one JSON object. The manifest contains the indexes of all shards; each shard also has its own at the end, so that
the file describes itself:

    <HDF5>{"sha256": "<64 hex digits>", "index": {...}}
    <15 digits: bytes of HDF5>

The length of an index does not depend on the values of the checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.durable_files import read_at
from hpctrain.checkpoint.format.strict_json import JsonReader, is_hex, parse_json
from hpctrain.train.saved_arrays import lies_in

LEAST_BLOCK_BYTES = 1 << 10
MOST_BLOCK_BYTES = 1 << 26
"""Limit on the block size, which is the memory that a reader needs to verify a part of a piece."""
TRAILER_BYTES = 16
MOST_INDEX_BYTES = 1 << 30
FRAME = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "index": (.*)\}\n([0-9]{15})\n', re.DOTALL)


def piece_text(piece: layout.TensorPiece, offset: int) -> str:
    """A piece's entry up to the checksums, which are the only part that changes between saves."""
    tensor = piece.tensor
    entry = {
        "name": tensor.name,
        **({"dataset": piece.dataset} if piece.dataset else {}),
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "rank": tensor.rank,
        "begin": list(piece.box.begin),
        "count": list(piece.box.shape),
        "offset": offset,
    }
    return json.dumps(entry, separators=(",", ":"))[:-1] + ',"crc32":'


def shard_text(
    file: str, hdf5_bytes: int, between: int, block_bytes: int, piece_texts: Sequence[str], sums: Sequence[str]
) -> bytes:
    """Assemble an index.

    Args:
        file: file name of the shard.
        hdf5_bytes: size of its HDF5 part.
        between: CRC-32 of the bytes between the pieces.
        block_bytes: size of each block but a piece's last.
        piece_texts: ``piece_text`` of each piece.
        sums: for each piece, the CRC-32 of its blocks, 8 hex digits per block.
    """
    pieces = ",".join([f'{text}"{crc}"}}' for text, crc in zip(piece_texts, sums, strict=True)])

    def text(num_bytes: int) -> bytes:
        return (
            f'{{"file":"{file}","bytes":{num_bytes:>17},"hdf5_bytes":{hdf5_bytes},"block_bytes":{block_bytes},'
            f'"crc32":"{between:08x}","tensors":[{pieces}]}}'
        ).encode()

    return text(hdf5_bytes + len(framed(text(0), hdf5_bytes)))


def text_of(shard: layout.Shard) -> bytes:
    """Encode the index of a shard, which is faster than parsing one."""
    texts = [piece_text(stored.piece, stored.offset) for stored in shard.pieces]
    sums = ["".join([f"{crc:08x}" for crc in stored.crc32 or ()]) for stored in shard.pieces]
    block_bytes = shard.pieces[0].block_bytes if shard.pieces else 0
    return shard_text(shard.file, shard.hdf5_bytes, shard.crc32, block_bytes, texts, sums)


def framed(text: bytes, hdf5_bytes: int) -> bytes:
    """Frame an index as at the end of a shard."""
    return b'{"sha256": "%s", "index": %s}\n%015d\n' % (hashlib.sha256(text).hexdigest().encode(), text, hdf5_bytes)


def unframed(data: bytes, hdf5_bytes: int) -> bytes | None:
    """The index in a shard's last bytes, or None if they differ from what was written."""
    frame = FRAME.fullmatch(data)
    if frame is None or int(frame[3]) != hdf5_bytes or hashlib.sha256(frame[2]).hexdigest().encode() != frame[1]:
        return None
    return frame[2]


def read_text(descriptor: int, path: Path) -> bytes:
    """Read the index at the end of an open shard. Raises OSError, or DamagedCheckpoint if it is incomplete."""
    size = os.fstat(descriptor).st_size
    trailer = bytearray(min(size, TRAILER_BYTES))
    read_at(descriptor, memoryview(trailer), size - len(trailer))
    begin = int(trailer) if re.fullmatch(rb"[0-9]{15}\n", trailer) else size
    text = None
    if begin < size <= begin + MOST_INDEX_BYTES:
        data = bytearray(size - begin)
        read_at(descriptor, memoryview(data), begin)
        text = unframed(bytes(data), begin)
    if text is None:
        raise layout.DamagedCheckpoint(
            f"{path} does not end in an index of what it holds: it was cut short or overwritten"
        )
    return text


def parse(value: Any, where: str) -> layout.Shard:
    """Convert a parsed index to a Shard.

    Raises:
        DamagedCheckpoint: an entry is invalid, or pieces overlap or are outside the file.
    """
    reader = JsonReader(value, where)
    num_bytes = reader.integer("bytes", 1, layout.MAX_BYTES)
    block_bytes = reader.integer("block_bytes", LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES)
    if block_bytes % LEAST_BLOCK_BYTES:
        reader.fail(f"blocks of {block_bytes} bytes")
    shard = layout.Shard(
        file=reader.get("file", str, "a string"),
        num_bytes=num_bytes,
        hdf5_bytes=reader.integer("hdf5_bytes", 1, num_bytes - 1),
        crc32=reader.crc32(),
        pieces=reader.list_of("tensors", lambda item, place: piece_from_json(item, place, block_bytes)),
    )
    require_room(shard, reader)
    return shard


def parse_text(text: bytes, where: str) -> layout.Shard:
    """Parse an index's JSON to a Shard. Raises as ``parse``."""
    return parse(parse_json(text, where), where)


def require_same(data: bytes, shard: layout.Shard, path: Path) -> None:
    """Raise DamagedCheckpoint unless a shard's last bytes are an index that matches the manifest."""
    text = unframed(data, shard.hdf5_bytes)
    if text is None:
        raise layout.DamagedCheckpoint(f"{path} is damaged: the checksum of its index does not match")
    if text != text_of(shard) and parse_text(text, str(path)) != shard:
        raise layout.DamagedCheckpoint(f"{path} has an index that differs from the manifest")


KEYS = ("name", "dtype", "shape", "rank", "offset", "begin", "count", "crc32")


def piece_from_json(value: Any, where: str, block_bytes: int) -> layout.StoredPiece:
    """Parse a piece's entry. Optimized for speed, since there may be many thousands."""

    def fail(problem: str) -> NoReturn:
        raise layout.DamagedCheckpoint(f"{where}: {problem}")

    entry: Any = value if type(value) is dict else fail("it is not an object")
    name, dtype, shape, rank, offset, begin, count, sums = map(entry.get, KEYS)
    if type(name) is not str or layout.name_problem(name):
        fail(f"{str(name)[:100]!r} is not a name")
    if type(dtype) is not str or dtype not in layout.ITEM_TYPES:
        fail(f"{name} has the unknown type {str(dtype)[:50]}")
    if not are_counts(shape) or len(shape) > layout.MAX_DIMENSIONS:
        fail(f"{name} has the shape {str(shape)[:100]}")
    if "rank" not in entry or not (rank is None or is_count(rank)):
        fail(f"{name} belongs to rank {str(rank)[:50]}")
    if not is_count(offset):
        fail(f"{name} begins at {str(offset)[:50]}")
    tensor = layout.TensorSpec(name, tuple(shape), dtype, rank)
    if tensor.largest_bytes > layout.MAX_BYTES:
        fail(f"{name} cannot have the shape {tensor.shape}")
    if not are_counts(begin) or not are_counts(count):
        fail(f"{name} has the range {str(begin)[:100]}, {str(count)[:100]}")
    dataset = entry.get("dataset", name)
    if type(dataset) is not str or layout.name_problem(dataset):
        fail(f"{str(dataset)[:100]!r} is not a name")
    if not lies_in(begin, count, shape):
        fail(f"{name} has the range {begin}, {count} of {shape}")
    piece = layout.TensorPiece(tensor, Box(tuple(begin), tuple(count)), "" if dataset == name else dataset)
    if not is_hex(sums, 8 * -(-piece.num_bytes // block_bytes)):
        fail(f"{name} has the checksums {str(sums)[:50]}")
    crc32 = tuple(int(sums[at : at + 8], 16) for at in range(0, len(sums), 8))
    return layout.StoredPiece(piece, offset, block_bytes, crc32)


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to MAX_BYTES."""
    return type(value) is int and 0 <= value <= layout.MAX_BYTES


def are_counts(value: Any) -> bool:
    """Whether a value is a list of integers from 0 to MAX_BYTES."""
    return type(value) is list and all(map(is_count, value))


def require_room(shard: layout.Shard, reader: JsonReader) -> None:
    """Raise DamagedCheckpoint if pieces overlap or extend beyond the HDF5 part of the file."""
    position = 0
    for stored in sorted(shard.pieces, key=lambda stored: stored.offset):
        if stored.piece.num_bytes and stored.offset < position:
            reader.fail(f"the bytes of {stored.piece.tensor.name} overlap others")
        position = max(position, stored.offset + stored.piece.num_bytes)
    if position > shard.hdf5_bytes:
        reader.fail("a tensor reaches beyond the end of the file")

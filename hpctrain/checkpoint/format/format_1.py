"""Entries of a manifest of format 1, which is read for good: tensors split by rows, one checksum for each piece."""

from __future__ import annotations

from typing import Any

from hpctrain.checkpoint.format.entries import are_counts, require_room, tensor_of
from hpctrain.checkpoint.format.layout import MAX_BYTES, DamagedCheckpoint, Shard, StoredPiece, rows_of
from hpctrain.checkpoint.format.strict_json import Reader, is_crc32


def shard_from_json(value: Any, where: str) -> Shard:
    """A shard's entry; its checksum is that of the whole file."""
    reader = Reader(value, where)
    num_bytes = reader.integer("bytes", 1, MAX_BYTES)
    shard = Shard(
        file=reader.get("file", str, "a string"),
        num_bytes=num_bytes,
        hdf5_bytes=num_bytes,
        crc32=reader.crc32(),
        pieces=reader.list_of("tensors", piece_from_json),
    )
    require_room(shard, reader)
    return shard


def piece_from_json(value: Any, where: str) -> StoredPiece:
    """A tensor's entry in a shard; all its bytes are one block."""
    tensor = tensor_of(value, where)
    rows, crc32 = value.get("rows"), value.get("crc32")
    if not are_counts(rows) or len(rows) != 2 or not rows[0] <= rows[1] <= tensor.rows:
        raise DamagedCheckpoint(f"{where}: {tensor.name} has the rows {str(rows)[:100]}")
    if not is_crc32(crc32):
        raise DamagedCheckpoint(f"{where}: {tensor.name} has the checksum {str(crc32)[:50]}")
    piece = rows_of(tensor, rows[0], rows[1] - rows[0])
    size = piece.num_bytes
    return StoredPiece(piece, value["offset"], max(1, size), (int(crc32, 16),) if size else ())

"""The manifest as bytes, and back with nothing taken on trust.

The file is one JSON object, ``{"sha256": "<64 hex digits>", "manifest": {...}}`` and a newline. The sum covers the
bytes of the inner object as they stand, so it is checked before any of them is interpreted.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format.files import reading
from hpctrain.checkpoint.format.layout import (
    FORMAT,
    ITEM_TYPES,
    MANIFEST_FILE,
    MAX_BYTES,
    MAX_DIMENSIONS,
    VERSION,
    DamagedCheckpoint,
    Manifest,
    Piece,
    Shard,
    StoredPiece,
    TensorSpec,
    name_problem,
    shard_file,
)
from hpctrain.checkpoint.format.strict_json import Reader, is_crc32, parse_json, to_json
from hpctrain.errors import UserError

MAX_MANIFEST_BYTES = 1 << 30
PIECE_KEYS = ("name", "dtype", "shape", "rank", "rows", "offset", "crc32")
FRAME = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (.*)\}\n', re.DOTALL)


def encode(step: int, ranks: int, meta: Mapping[str, Any], shard_texts: Iterable[bytes]) -> bytes:
    """The file's bytes. Raises UserError if ``meta`` is not plain JSON."""
    head = to_json({"format": FORMAT, "version": VERSION, "step": step, "ranks": ranks, "meta": meta})
    body = b'%s,"shards":[%s]}' % (head[:-1], b",\n".join(shard_texts))
    return b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def shard_text(file: str, num_bytes: int, crc32: int, piece_texts: Sequence[str], piece_sums: Sequence[int]) -> bytes:
    """A shard's entry, from the ``piece_text`` and the CRC-32 of each of its pieces."""
    pieces = ",".join([f'{text}"{crc:08x}"}}' for text, crc in zip(piece_texts, piece_sums, strict=True)])
    return f'{{"file":"{file}","bytes":{num_bytes},"crc32":"{crc32:08x}","tensors":[{pieces}]}}'.encode()


def piece_text(piece: Piece, offset: int) -> str:
    """A piece's entry up to the value of its checksum, which is all that changes from save to save."""
    tensor = piece.tensor
    entry = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "rank": tensor.rank,
        "rows": [piece.first_row, piece.first_row + piece.rows],
        "offset": offset,
    }
    return json.dumps(entry, separators=(",", ":"))[:-1] + ',"crc32":'


def read(folder: Path, step: int) -> Manifest:
    """The manifest of a step's checkpoint in a folder.

    Raises:
        DamagedCheckpoint: it is missing, or is not exactly what was once written.
        UnreadableCheckpoint: it cannot be read now.
    """
    return read_with_bytes(folder, step)[1]


def read_with_bytes(folder: Path, step: int) -> tuple[bytes, Manifest]:
    """The file's bytes, and the manifest in them. Raises as ``read`` does."""
    path = folder / MANIFEST_FILE
    with reading(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_MANIFEST_BYTES:
            raise DamagedCheckpoint(f"{path} has {size} bytes, more than a manifest can have")
        data = b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))
        return data, parse_of_step(data, path, step)


def parse_of_step(data: bytes, path: Path, step: int) -> Manifest:
    """The manifest in a file's bytes. Raises DamagedCheckpoint also if it is another step's."""
    manifest = parse(data, str(path))
    if manifest.step != step:
        raise DamagedCheckpoint(f"{path} is from step {manifest.step}: it belongs to another checkpoint")
    return manifest


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in a file's bytes, after its own checksum. Raises DamagedCheckpoint on anything unexpected."""
    frame = FRAME.fullmatch(data)
    if frame is None:
        raise DamagedCheckpoint(f"{where} is not a manifest: it was cut short or overwritten")
    if hashlib.sha256(frame[2]).hexdigest().encode() != frame[1]:
        raise DamagedCheckpoint(f"{where} is damaged: its checksum does not match")
    with no_garbage_collection():
        return manifest_from_json(parse_json(frame[2], where), where)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For making many objects that stay: meanwhile Python would look several times through all that frameworks hold."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def manifest_from_json(value: Any, where: str) -> Manifest:
    """Checks the document and all its parts against each other."""
    reader = Reader(value, where)
    if reader.get("format", str, "a string") != FORMAT:
        reader.fail("it is not from an hpctrain checkpoint")
    version = reader.integer("version", 1, 2**31)
    if version > VERSION:
        raise UserError(
            f"{where} has format version {version}; this program reads {VERSION}", "install a newer hpctrain"
        )
    manifest = Manifest(
        step=reader.integer("step", 0, 10**18 - 1),
        ranks=reader.integer("ranks", 1, 10**9),
        shards=reader.list_of("shards", shard_from_json),
        meta=reader.get("meta", dict, "an object"),
    )
    problem = coverage_problem(manifest)
    if problem:
        reader.fail(problem)
    return manifest


def shard_from_json(value: Any, where: str) -> Shard:
    """A shard's entry, its pieces within the file and apart from each other."""
    reader = Reader(value, where)
    shard = Shard(
        file=reader.get("file", str, "a string"),
        num_bytes=reader.integer("bytes", 1, MAX_BYTES),
        crc32=reader.crc32(),
        pieces=reader.list_of("tensors", piece_from_json),
    )
    position = 0
    for stored in sorted(shard.pieces, key=lambda stored: stored.offset):
        if stored.piece.num_bytes and stored.offset < position:
            reader.fail(f"the bytes of {stored.piece.tensor.name} overlap others")
        position = max(position, stored.offset + stored.piece.num_bytes)
    if position > shard.num_bytes:
        reader.fail("a tensor reaches beyond the end of the file")
    return shard


def piece_from_json(value: Any, where: str) -> StoredPiece:
    """A tensor's entry in a shard. Written for speed: there may be many thousands."""
    problem = piece_problem(value)
    if problem:
        raise DamagedCheckpoint(f"{where}: {problem}")
    tensor = TensorSpec(value["name"], tuple(value["shape"]), value["dtype"], value["rank"])
    first, last = value["rows"]
    if tensor.largest_bytes > MAX_BYTES or last > tensor.rows:
        raise DamagedCheckpoint(f"{where}: {tensor.name} cannot have the shape {tensor.shape} and rows up to {last}")
    return StoredPiece(Piece(tensor, first, last - first), value["offset"], int(value["crc32"], 16))


def piece_problem(value: Any) -> str | None:
    """Why a value is not a tensor's entry, or None; whether its numbers fit each other is checked elsewhere."""
    if type(value) is not dict:
        return "it is not an object"
    name, dtype, shape, rank, rows, offset, crc32 = map(value.get, PIECE_KEYS)
    if type(name) is not str or name_problem(name):
        return f"{str(name)[:100]!r} is not a name"
    if type(dtype) is not str or dtype not in ITEM_TYPES:
        return f"{name} has the unknown type {str(dtype)[:50]}"
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS or not all(map(is_count, shape)):
        return f"{name} has the shape {str(shape)[:100]}"
    if type(rows) is not list or len(rows) != 2 or not all(map(is_count, rows)) or rows[0] > rows[1]:
        return f"{name} has the rows {str(rows)[:100]}"
    if "rank" not in value or not (rank is None or is_count(rank)):
        return f"{name} belongs to rank {str(rank)[:50]}"
    if not is_count(offset):
        return f"{name} begins at {str(offset)[:50]}"
    return None if is_crc32(crc32) else f"{name} has the checksum {str(crc32)[:50]}"


def is_count(value: Any) -> bool:
    """Whether a value is a whole number within reason."""
    return type(value) is int and 0 <= value <= MAX_BYTES


def coverage_problem(manifest: Manifest) -> str | None:
    """Why the shards do not make up every tensor exactly once, or None."""
    for index, shard in enumerate(manifest.shards):
        if shard.file != shard_file(index, len(manifest.shards)):
            return f"shard {index} of {len(manifest.shards)} is called {shard.file[:100]!r}"
    next_row: dict[tuple[str, int | None], int] = {}
    specs: dict[tuple[str, int | None], TensorSpec] = {}
    for shard in manifest.shards:
        for stored in shard.pieces:
            tensor, key = stored.piece.tensor, stored.piece.tensor.key
            if specs.setdefault(key, tensor) is not tensor and specs[key] != tensor:
                return f"the shards disagree about the shape of {tensor.name}"
            if tensor.rank is not None and tensor.rank >= manifest.ranks:
                return f"{tensor.name} belongs to rank {tensor.rank} of {manifest.ranks}"
            repeated = key in next_row and not stored.piece.rows
            if stored.piece.first_row != next_row.get(key, 0) or repeated:
                return f"rows of {tensor.name} are missing or there twice"
            next_row[key] = stored.piece.first_row + stored.piece.rows
    both = next((name for name, rank in specs if rank is not None and (name, None) in specs), None)
    if both is not None:
        return f"{both} belongs to single ranks and to all of them"
    short = next((tensor.name for key, tensor in specs.items() if next_row[key] != tensor.rows), None)
    return f"rows of {short} are missing" if short else None

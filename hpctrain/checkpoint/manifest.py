"""The manifest as bytes, and back with nothing taken on trust.

The file is one JSON object, ``{"sha256": "<64 hex digits>", "manifest": {...}}`` and a newline. The sum covers the
bytes of the inner object as they stand, so it is checked before any of them is interpreted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.checkpoint.files import open_regular
from hpctrain.checkpoint.format import (
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
from hpctrain.errors import UserError

MAX_MANIFEST_BYTES = 1 << 30
FRAME = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (.*)\}\n', re.DOTALL)


def encode(manifest: Manifest) -> bytes:
    """The file's bytes. Raises UserError where ``meta`` is not plain JSON."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "ranks": manifest.ranks,
        "meta": manifest.meta,
        "shards": [shard_to_json(shard) for shard in manifest.shards],
    }
    body = to_json(document)
    return b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def to_json(document: Mapping[str, Any]) -> bytes:
    """Compact JSON. Raises UserError where a value is none of JSON's."""
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the checkpoint's meta is no JSON: {error}", "pass dicts, lists, strings, finite numbers"
        ) from error


def shard_to_json(shard: Shard) -> dict[str, Any]:
    """A shard's entry."""
    return {
        "file": shard.file,
        "bytes": shard.num_bytes,
        "crc32": f"{shard.crc32:08x}",
        "tensors": [
            {
                "name": stored.piece.tensor.name,
                "dtype": stored.piece.tensor.dtype,
                "shape": list(stored.piece.tensor.shape),
                "rank": stored.piece.tensor.rank,
                "rows": [stored.piece.first_row, stored.piece.first_row + stored.piece.rows],
                "offset": stored.offset,
                "crc32": f"{stored.crc32:08x}",
            }
            for stored in shard.pieces
        ],
    }


def read(folder: Path, step: int) -> Manifest:
    """The manifest of a step's checkpoint in a folder.

    Raises:
        DamagedCheckpoint: it is missing, cannot be read, or is not exactly what was once written.
    """
    path = folder / MANIFEST_FILE
    try:
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            if size > MAX_MANIFEST_BYTES:
                raise DamagedCheckpoint(f"{path} has {size} bytes, more than a manifest can have")
            data = b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    manifest = parse(data, str(path))
    if manifest.step != step:
        raise DamagedCheckpoint(f"{path} is of step {manifest.step}: it belongs to another checkpoint")
    return manifest


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in a file's bytes, after its own checksum. Raises DamagedCheckpoint on anything unexpected."""
    frame = FRAME.fullmatch(data)
    if frame is None:
        raise DamagedCheckpoint(f"{where} is not a manifest: it was cut short or overwritten")
    if hashlib.sha256(frame[2]).hexdigest().encode() != frame[1]:
        raise DamagedCheckpoint(f"{where} is damaged: its checksum does not match")
    return manifest_from_json(parse_json(frame[2], where), where)


def parse_json(data: bytes, where: str) -> Any:
    """Strict JSON: no duplicate keys, no NaN or Infinity. Raises DamagedCheckpoint."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(data, object_pairs_hook=unique_keys, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is not valid JSON: {error}") from error


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of the pairs. Raises ValueError on a repeated key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


class Reader:
    """Takes typed values out of parsed JSON; everything unexpected is a DamagedCheckpoint that says where."""

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        self.value = self._expect(dict, value, "an object")

    def _expect(self, kind: type, value: Any, what: str) -> Any:
        if type(value) is not kind:
            self.fail(f"{str(value)[:50]} is not {what}")
        return value

    def fail(self, problem: str) -> NoReturn:
        """Raises DamagedCheckpoint."""
        raise DamagedCheckpoint(f"{self.where}: {problem}")

    def get(self, key: str, kind: type, what: str) -> Any:
        """A required value of exactly this type."""
        if key not in self.value:
            self.fail(f"{key} is missing")
        return self._expect(kind, self.value[key], f"{what} ({key})")

    def integer(self, key: str, least: int, most: int) -> int:
        """A whole number within bounds."""
        return self.in_range(self.get(key, int, "a whole number"), least, most, key)

    def in_range(self, number: Any, least: int, most: int, what: str) -> int:
        """The number itself, if it is whole and within bounds."""
        if type(number) is not int or not least <= number <= most:
            self.fail(f"{what} is {str(number)[:50]}, not a whole number from {least} to {most}")
        return int(number)

    def crc32(self) -> int:
        """The value of ``crc32``."""
        text = self.get("crc32", str, "a string")
        if not re.fullmatch("[0-9a-f]{8}", text):
            self.fail("crc32 is not 8 hex digits")
        return int(text, 16)

    def list_of(self, key: str, convert: Callable[[Any, str], Any]) -> tuple[Any, ...]:
        """Each item of a list, converted."""
        items = self.get(key, list, "a list")
        return tuple(convert(item, f"{self.where}, {key} {index}") for index, item in enumerate(items))


def manifest_from_json(value: Any, where: str) -> Manifest:
    """Checks the document and all its parts against each other."""
    reader = Reader(value, where)
    if reader.get("format", str, "a string") != FORMAT:
        reader.fail("it is not of a hpctrain checkpoint")
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
    """A tensor's entry in a shard."""
    reader = Reader(value, where)
    name = reader.get("name", str, "a string")
    problem = name_problem(name)
    if problem:
        reader.fail(f"{name[:100]!r} {problem}")
    reader.where = f"{where} ({name})"
    dtype = reader.get("dtype", str, "a string")
    if dtype not in ITEM_TYPES:
        reader.fail(f"unknown type {dtype[:50]!r}")
    shape = tuple(reader.in_range(length, 0, MAX_BYTES, "a length") for length in reader.get("shape", list, "a list"))
    rank = reader.value.get("rank")
    tensor = TensorSpec(name, shape, dtype, rank if rank is None else reader.in_range(rank, 0, 10**9, "rank"))
    if len(shape) > MAX_DIMENSIONS or tensor.num_bytes > MAX_BYTES:
        reader.fail(f"no tensor has the shape {str(shape)[:100]}")
    rows = reader.get("rows", list, "a list")
    if len(rows) != 2:
        reader.fail("rows is not a pair")
    first = reader.in_range(rows[0], 0, tensor.rows, "the first row")
    last = reader.in_range(rows[1], first, tensor.rows, "the last row")
    return StoredPiece(Piece(tensor, first, last - first), reader.integer("offset", 0, MAX_BYTES), reader.crc32())


def coverage_problem(manifest: Manifest) -> str | None:
    """Why the shards do not make up every tensor exactly once, or None."""
    for index, shard in enumerate(manifest.shards):
        if shard.file != shard_file(index, len(manifest.shards)):
            return f"shard {index} of {len(manifest.shards)} is called {shard.file[:100]!r}"
    next_row: dict[tuple[str, int | None], int] = {}
    specs: dict[tuple[str, int | None], TensorSpec] = {}
    for shard in manifest.shards:
        for stored in shard.pieces:
            tensor = stored.piece.tensor
            if specs.setdefault(tensor.key, tensor) != tensor:
                return f"the shards disagree about the shape of {tensor.name}"
            if tensor.rank is not None and tensor.rank >= manifest.ranks:
                return f"{tensor.name} belongs to rank {tensor.rank} of {manifest.ranks}"
            repeated = tensor.key in next_row and not stored.piece.rows
            if stored.piece.first_row != next_row.get(tensor.key, 0) or repeated:
                return f"rows of {tensor.name} are missing or there twice"
            next_row[tensor.key] = stored.piece.first_row + stored.piece.rows
    short = next((tensor.name for key, tensor in specs.items() if next_row[key] != tensor.rows), None)
    return f"rows of {short} are missing" if short else None

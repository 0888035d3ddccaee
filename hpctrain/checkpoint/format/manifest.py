"""Encodes and strictly parses manifests.

The file is one JSON object, ``{"sha256": "<64 hex digits>", "manifest": {...}}``, and a newline. The hash covers the
bytes of the inner object, so it is checked before any of them is parsed.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format import layout, shard_index
from hpctrain.checkpoint.format.boxes import Box, tiling_problem
from hpctrain.checkpoint.format.durable_files import reading
from hpctrain.checkpoint.format.strict_json import JsonReader, parse_json, to_json
from hpctrain.errors import UserError

MAX_MANIFEST_BYTES = 1 << 30
FRAME = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (.*)\}\n', re.DOTALL)


def encode(step: int, ranks: int, meta: Mapping[str, Any], shard_texts: Iterable[bytes]) -> bytes:
    """Encode a manifest file. Raises UserError if ``meta`` is not JSON."""
    head = to_json({"format": layout.FORMAT, "version": layout.VERSION, "step": step, "ranks": ranks, "meta": meta})
    body = b'%s,"shards":[%s]}' % (head[:-1], b",\n".join(shard_texts))
    return b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def with_shards(data: bytes, where: str, shard_texts: Iterable[bytes]) -> bytes:
    """Replace the shards of an encoded manifest. Raises DamagedCheckpoint if it is damaged."""
    reader = JsonReader(parse_json(body_of(data, where), where), where)
    step = reader.integer("step", 0, 10**18 - 1)
    ranks = reader.integer("ranks", 1, 10**9)
    return encode(step, ranks, reader.get("meta", dict, "an object"), shard_texts)


def read(folder: Path, step: int) -> layout.Manifest:
    """Read the manifest of a step's checkpoint from its folder.

    Raises:
        DamagedCheckpoint: it is missing, or differs from what was written.
        UnreadableCheckpoint: it cannot be read now.
    """
    return read_with_bytes(folder, step)[1]


def read_with_bytes(folder: Path, step: int) -> tuple[bytes, layout.Manifest]:
    """Read the file's bytes, and the manifest in them. Raises as ``read`` does."""
    path = folder / layout.MANIFEST_FILE
    data = read_bytes(path)
    return data, parse_of_step(data, path, step)


def read_bytes(path: Path) -> bytes:
    """Read the bytes of a manifest file. Raises as ``read`` does."""
    with reading(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_MANIFEST_BYTES:
            raise layout.DamagedCheckpoint(f"{path} has {size} bytes, more than a manifest can have")
        return b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))


def parse_of_step(data: bytes, path: Path, step: int) -> layout.Manifest:
    """Parse a file's bytes. Raises DamagedCheckpoint also if the manifest is of a different step."""
    manifest = parse(data, str(path))
    if manifest.step != step:
        raise layout.DamagedCheckpoint(f"{path} is from step {manifest.step}: it belongs to another checkpoint")
    return manifest


def parse(data: bytes, where: str) -> layout.Manifest:
    """Verify the checksum and parse a file's bytes. Raises DamagedCheckpoint on anything unexpected."""
    body = body_of(data, where)
    with no_garbage_collection():
        return manifest_from_json(parse_json(body, where), where)


def body_of(data: bytes, where: str) -> bytes:
    """The bytes of the inner object, with the checksum verified. Raises DamagedCheckpoint."""
    frame = FRAME.fullmatch(data)
    if frame is None:
        raise layout.DamagedCheckpoint(f"{where} is not a manifest: it was cut short or overwritten")
    if hashlib.sha256(frame[2]).hexdigest().encode() != frame[1]:
        raise layout.DamagedCheckpoint(f"{where} is damaged: its checksum does not match")
    return frame[2]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while many objects are created: it would repeatedly scan the frameworks' objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def manifest_from_json(value: Any, where: str) -> layout.Manifest:
    """Convert the parsed document to a Manifest, with all checks. Raises DamagedCheckpoint, UserError."""
    reader = JsonReader(value, where)
    if reader.get("format", str, "a string") != layout.FORMAT:
        reader.fail("it is not from an hpctrain checkpoint")
    version = reader.integer("version", 1, 2**31)
    if version != layout.VERSION:
        fix = "install the version of hpctrain that saved it"
        raise UserError(f"{where} has format version {version}; this program reads {layout.VERSION}", fix)
    manifest = layout.Manifest(
        step=reader.integer("step", 0, 10**18 - 1),
        ranks=reader.integer("ranks", 1, 10**9),
        shards=reader.list_of("shards", shard_index.parse),
        meta=reader.get("meta", dict, "an object"),
    )
    problem = coverage_problem(manifest)
    if problem:
        reader.fail(problem)
    return manifest


def coverage_problem(manifest: layout.Manifest) -> str | None:
    """Why the shards do not cover every tensor exactly once, or None."""
    if not manifest.shards:
        return "it lists no shard"
    for index, shard in enumerate(manifest.shards):
        if shard.file != layout.shard_file(index, len(manifest.shards)):
            return f"shard {index} of {len(manifest.shards)} is called {shard.file[:100]!r}"
    specs: dict[tuple[str, int | None], layout.TensorSpec] = {}
    boxes: dict[tuple[str, int | None], list[Box]] = {}
    for shard in manifest.shards:
        for stored in shard.pieces:
            tensor, key = stored.piece.tensor, stored.piece.tensor.key
            if specs.setdefault(key, tensor) is not tensor and specs[key] != tensor:
                return f"the shards disagree about the shape of {tensor.name}"
            if tensor.rank is not None and tensor.rank >= manifest.ranks:
                return f"{tensor.name} belongs to rank {tensor.rank} of {manifest.ranks}"
            boxes.setdefault(key, []).append(stored.piece.box)
    both = next((name for name, rank in specs if rank is not None and (name, None) in specs), None)
    if both is not None:
        return f"{both} belongs to single ranks and to all of them"
    problems = ((key, tiling_problem(specs[key].shape, boxes[key])) for key in specs)
    return next((f"{key[0]}: {problem}" for key, problem in problems if problem), None)

"""The safetensors format: an 8-byte length, a JSON header, the values. https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.durable_files import reading
from hpctrain.checkpoint.format.shard_reading import Checks, OpenPiece, RecentBlocks
from hpctrain.checkpoint.format.strict_json import JsonReader, parse_json, to_json
from hpctrain.checkpoint.read_retry import retry_read
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.train.saved_arrays import SavedArrays, as_saved, require_inside, runs_of_rows

CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
BLOCK_BYTES = 4 << 20
"""Maximum bytes of an array in memory at a time, unless a row is larger."""
MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""


def encode(arrays: Mapping[str, Array], dtypes: Mapping[str, str], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the file's bytes in consecutive parts; arrays are read by rows.

    Args:
        arrays: arrays by name; bfloat16 as uint16.
        dtypes: logical types by name. Raises KeyError for complex numbers.
        metadata: strings by name.
    """
    code_of = {name: code for code, name in CODES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    source = as_saved(arrays)
    tensors = [layout.TensorSpec(name, source.shape_of(name), dtypes[name]) for name in source]
    for tensor in tensors:
        end = position + tensor.num_bytes
        header[tensor.name] = {
            "dtype": code_of[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = to_json(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        for first, count in runs_of_rows(tensor.shape or (1,), tensor.row_bytes, BLOCK_BYTES):
            box = layout.rows_of(tensor, first, count).box
            yield source.part(tensor.name, box.begin, box.shape).tobytes()


def read(path: Path) -> tuple[SavedArrays, dict[str, str]]:
    """Open a file: arrays (bfloat16 as uint16), read on access, and logical types, by name.

    Raises:
        UserError: the file is not a safetensors file.
        DamagedCheckpoint: its header does not match its content.
        UnreadableCheckpoint: it cannot be read now; also on access to arrays.
    """
    with reading(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(f"{path} is not a safetensors file", "give one, or a .pt file of a model.state_dict()")
        header = JsonReader(parse_json(file.read(length), str(path)), str(path))
    first, pieces = 8 + length, {}
    for name in header.value:
        if name == "__metadata__":
            continue
        entry = JsonReader(header.get(name, dict, "an object"), f"{path}, {name}")
        code = entry.get("dtype", str, "a string")
        if code not in CODES:
            entry.fail(f"unknown type {code[:50]!r}")
        shape = tuple(
            entry.in_range(axis, 0, layout.MAX_BYTES, "a length") for axis in entry.get("shape", list, "a list")
        )
        ends = [entry.in_range(at, 0, size - first, "an offset") for at in entry.get("data_offsets", list, "a list")]
        tensor = layout.TensorSpec(name, shape, CODES[code])
        if len(shape) > layout.MAX_DIMENSIONS or len(ends) != 2 or ends[1] - ends[0] != tensor.num_bytes:
            entry.fail("shape and data_offsets do not agree")
        pieces[name] = layout.StoredPiece(layout.whole_tensor(tensor), first + ends[0], BLOCK_BYTES, None)
    arrays = FileArrays(path, pieces)
    return arrays, {name: stored.piece.tensor.dtype for name, stored in pieces.items()}


class FileArrays(SavedArrays):
    """Arrays in a file, which is opened on each access."""

    def __init__(self, path: Path, pieces: Mapping[str, layout.StoredPiece]) -> None:
        super().__init__(pieces)
        self.path = path
        self.pieces = pieces
        self.recent = RecentBlocks()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.pieces[name].piece.tensor.shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return layout.ITEM_TYPES[self.pieces[name].piece.tensor.dtype]

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        require_inside(name, begin, shape, self.shape_of(name))
        return retry_read(lambda: self._read_once(name, Box(begin, shape)))

    def _read_once(self, name: str, wanted: Box) -> Array:
        with reading(self.path) as descriptor:
            out = np.empty(wanted.shape, self.dtype_of(name))
            OpenPiece(descriptor, self.path, self.pieces[name], Checks()).read_part(wanted, out, self.recent)
        return out

"""The safetensors format: an 8-byte length, a JSON header, the values. https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.files import reading
from hpctrain.checkpoint.format.layout import ITEM_TYPES, MAX_BYTES, MAX_DIMENSIONS, DamagedCheckpoint, TensorSpec
from hpctrain.checkpoint.format.strict_json import Reader, parse_json, to_json

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
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def encode(arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str], metadata: Mapping[str, str]) -> list[bytes]:
    """The file as parts to be written in a row. ``dtypes`` are logical types. Raises KeyError for complex numbers."""
    code_of = {name: code for code, name in CODES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, array in arrays.items():
        end = position + array.nbytes
        header[name] = {"dtype": code_of[dtypes[name]], "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = to_json(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays.values())]


def read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays (bfloat16 as uint16) and logical types by name.

    Raises:
        DamagedCheckpoint: it is not a safetensors file.
        UnreadableCheckpoint: it cannot be read now.
    """
    with reading(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedCheckpoint(f"{path} is not a safetensors file", "give a .safetensors file")
        header = Reader(parse_json(file.read(length), str(path)), str(path))
        data = np.fromfile(file, dtype=np.uint8)
    arrays, dtypes = {}, {}
    for name in header.value:
        if name == "__metadata__":
            continue
        entry = Reader(header.get(name, dict, "an object"), f"{path}, {name}")
        code = entry.get("dtype", str, "a string")
        if code not in CODES:
            entry.fail(f"unknown type {code[:50]!r}")
        shape = tuple(entry.in_range(axis, 0, MAX_BYTES, "a length") for axis in entry.get("shape", list, "a list"))
        offsets = [entry.in_range(at, 0, data.size, "an offset") for at in entry.get("data_offsets", list, "a list")]
        tensor = TensorSpec(name, shape, CODES[code])
        if len(shape) > MAX_DIMENSIONS or len(offsets) != 2 or offsets[1] - offsets[0] != tensor.num_bytes:
            entry.fail("shape and data_offsets do not agree")
        arrays[name] = data[offsets[0] : offsets[1]].view(ITEM_TYPES[tensor.dtype]).reshape(shape)
        dtypes[name] = tensor.dtype
    return arrays, dtypes

"""JSON lines: one object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.formats.records import UnchangedFile
from hpctrain.errors import UserError, file_errors

BLOCK_BYTES = 16 * 2**20


class JsonLines:
    """Objects by line; empty lines do not count. Takes 16 bytes of memory a line."""

    def __init__(self, path: Path) -> None:
        self.path: str | Path = path
        self.file = UnchangedFile(path)
        self.begins, self.ends = lines_of(path)

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, rows: list[int]) -> list[dict[str, Any]]:
        parts = [(int(self.begins[row]), int(self.ends[row] - self.begins[row])) for row in rows]
        return [self._object(row, text) for row, text in zip(rows, self.file.read(parts), strict=True)]

    def plain(self, record: dict[str, Any]) -> Any:
        texts = [name for name, value in record.items() if isinstance(value, str)]
        if texts:
            raise UserError(
                f"{self.path}: {texts[0]!r} is text",
                "encode it: open_dataset(..., decode=function), or name only the fields to use",
            )
        return record

    def _object(self, row: int, text: bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UserError(f"{self.path}, record {row} is not JSON: {error}", "write a JSON object a line") from error
        if not isinstance(value, dict):
            raise UserError(f"{self.path}, record {row} is not a JSON object", "write a JSON object a line")
        return value


def lines_of(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each line that is not empty begins and ends, in bytes."""
    breaks, size = [], 0
    fix = "correct the path of the data"
    with file_errors(f"{path} cannot be read", fix), open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            breaks.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + size)
            size += len(block)
    ends = np.concatenate([*breaks, [size]]).astype(np.int64)
    begins = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    full = ends > begins + 1  # more than a carriage return
    return begins[full], ends[full]

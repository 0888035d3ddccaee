"""WebDataset tar shards: consecutive files with the same name up to the first dot form a sample."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.formats.records import KEY, UnchangedFile
from hpctrain.errors import UserError, requires

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
WHOLE_NUMBERS = ("cls", "cls2", "index", "inx", "id", "count")
"""Extensions that hold an integer as text, as in WebDataset."""


class TarShard:
    """The samples of one uncompressed tar file, indexed by its headers."""

    def __init__(self, path: Path) -> None:
        self.path: str | Path = path
        try:
            self.file = UnchangedFile(path)
            self.samples = index_of(path)
        except (OSError, tarfile.TarError) as error:
            raise UserError(
                f"{path} is not a tar file, or is damaged: {error}", "give tars without compression"
            ) from error

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, rows: list[int]) -> list[dict[str, Any]]:
        parts = [place for row in rows for place in self.samples[row][1].values()]
        contents = iter(self.file.read(parts))
        return [{KEY: self.samples[row][0], **{name: next(contents) for name in self.samples[row][1]}} for row in rows]

    def plain(self, record: dict[str, Any]) -> Any:
        where = f"{self.path}: {record[KEY]}"
        return {name: decoded(name, value, where) for name, value in record.items() if name != KEY}


def index_of(path: Path) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Key, and (offset, length) by extension, of each sample, in the order of the tar file."""
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            if not member.isreg() or not stem or not extension:
                continue
            key, extension = f"{folder}/{stem}".lstrip("/"), extension.lower()
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            if extension in samples[-1][1]:
                raise UserError(f"{path}: {member.name} occurs twice", "write each file of a sample once")
            samples[-1][1][extension] = (member.offset_data, member.size)
    return samples


def decoded(extension: str, content: bytes, where: str) -> NDArray[Any]:
    """Decode a file's content to an array by its extension; nothing is unpickled."""
    kind = extension.rpartition(".")[2]
    readers: dict[str, Callable[[bytes], Any]] = {
        "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
        "json": json.loads,
        **dict.fromkeys(WHOLE_NUMBERS, int),
        **dict.fromkeys(IMAGES, picture),
    }
    if kind not in readers:
        raise UserError(
            f"{where}.{extension} is of a kind that needs a function to decode it",
            "give open_dataset(..., decode=function), or name only the fields to use",
        )
    try:
        return np.asarray(readers[kind](content))
    except (ValueError, OSError) as error:
        raise UserError(f"{where}.{extension} cannot be read: {error}", "write it again") from error


def picture(content: bytes) -> NDArray[np.uint8]:
    """Decode an image to uint8[height, width, 3]."""
    with requires("pillow", "data"):
        from PIL import Image
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))

"""Files of records, JSON lines and WebDataset tar shards, which are indexed once and then read in any order."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hpctrain.data.casting import is_exact
from hpctrain.data.dataset import Field, Samples, choose, content_fingerprint, fields_like, users_code
from hpctrain.data.formats.away import retry_local
from hpctrain.data.samples import Sample, named, stack
from hpctrain.errors import UserError, file_errors, refusal, requires
from hpctrain.system.array_types import Array, Bytes, Ints

Decode = Callable[[dict[str, Any]], Any]
"""decode(record) returns a sample, a dict or tuple of arrays. The record is a JSON object, a tar record's files by
extension (as bytes, with ``__key__``), or a row of a table."""
KEY = "__key__"
"""Entry of a record that holds its name."""


class Records(Protocol):
    """The records of one file."""

    path: str | Path

    def __len__(self) -> int:
        """Number of records."""

    def read(self, rows: list[int]) -> list[dict[str, Any]]:
        """The stored records at these indices."""

    def plain(self, record: dict[str, Any]) -> Any:
        """Convert a record to a sample without ``decode``; raises UserError if it is not numeric."""


@dataclass(frozen=True)
class RecordDataset:
    """The records of one file as samples. Create it with ``open_records``, which checks them."""

    records: Records
    decode: Decode | None
    names: tuple[str, ...] | None
    ragged: bool
    fields: Mapping[str, Field]

    @property
    def ordered(self) -> bool:
        """See ``dataset.is_ordered``: writers of WebDataset tars sort a sample's files by extension."""
        return self.names is not None or self.decode is not None or not isinstance(self.records, TarShard)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, indices: Ints) -> Samples:
        rows = indices.tolist()
        records = self.records.read(rows)
        samples = (self._sample(row, record) for row, record in zip(rows, records, strict=True))
        return stack(samples, rows, str(self.records.path), self.fields)

    def fingerprint(self) -> str:
        return content_fingerprint(self)

    def _sample(self, row: int, record: dict[str, Any]) -> Sample:
        sample = sample_of(self.records, self.decode, self.names, row, record)
        return {name: fitted(value, self.fields.get(name)) for name, value in sample.items()}


def open_records(records: Records, decode: Decode | None, names: tuple[str, ...] | None, ragged: bool) -> RecordDataset:
    """Make a dataset of a file's records, with the fields of the first record.

    Raises:
        UserError: there are no records, or the first cannot be trained on.
    """
    where = str(records.path)
    if not len(records):
        raise UserError(f"{where} holds no records", "give data with at least one sample")
    first = sample_of(records, decode, names, 0, records.read([0])[0])
    return RecordDataset(records, decode, names, ragged, fields_like(first, len(records), ragged, where))


def sample_of(
    records: Records, decode: Decode | None, names: tuple[str, ...] | None, row: int, record: dict[str, Any]
) -> Sample:
    """A record's arrays; if that fails, raises UserError that names the record."""
    fix = "correct the record, or the function that decodes it"
    with users_code(f"{records.path}, record {row}", fix):
        if decode is not None:
            return named(decode(record), names)
        chosen = choose(list(record), names, f"{records.path}, record {row},")
        return named(records.plain({name: record[name] for name in record if name in chosen or name == KEY}), names)


def fitted(value: Array, field: Field | None) -> Array:
    """Cast the value to the field's dtype if that is lossless (integers to floats, empty lists), else return it."""
    if field is None or value.dtype == field.dtype:
        return value
    if value.size and not np.can_cast(value.dtype, field.dtype, "safe"):
        return value
    cast = value.astype(field.dtype)
    return cast if value.dtype.kind not in "iu" or is_exact(cast.real, value).all() else value


class UnchangedFile:
    """A file that is opened for each read, since there may be more shards than descriptors; it must not change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(f"{path} cannot be read", "correct the path of the data"):
            self.seen = self._look(os.stat(path))

    @staticmethod
    def _look(status: os.stat_result) -> tuple[int, int]:
        return status.st_size, status.st_mtime_ns

    def read(self, parts: list[tuple[int, int]]) -> list[bytes]:
        """Read the bytes at each (offset, length); raises UserError if the file has changed or cannot be read."""

        def read() -> list[bytes]:
            with open(self.path, "rb", buffering=0) as file:
                if self._look(os.fstat(file.fileno())) != self.seen:
                    what = f"{self.path} has changed since the run opened it"
                    raise UserError(what, "do not change data during a run")
                for offset, length in parts:  # all at once: otherwise each read waits for the disk in its turn
                    with suppress(OSError):
                        os.posix_fadvise(file.fileno(), offset, max(1, length), os.POSIX_FADV_WILLNEED)
                return [read_all(file.fileno(), length, offset) for offset, length in parts]

        with file_errors(f"{self.path} cannot be read", "make the file readable on every node"):
            return retry_local(str(self.path), read)


def read_all(descriptor: int, length: int, offset: int) -> bytes:
    """The bytes at an offset, which one system call may give in part: Linux gives at most 2 GiB, others less."""
    found = os.pread(descriptor, length, offset)
    while len(found) < length and (more := os.pread(descriptor, length - len(found), offset + len(found))):
        found += more
    return found


BLOCK_BYTES = 16 * 2**20


class JsonLines:
    """JSON objects, one per line; empty lines are skipped. The index takes 16 bytes of memory per line."""

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
            fix = "encode it: open_dataset(..., decode=function), or name only the fields to use"
            raise UserError(f"{self.path}: {texts[0]!r} is text", fix)
        return record

    def _object(self, row: int, text: bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UserError(f"{self.path}, record {row} is not JSON: {error}", "write one object per line") from error
        if not isinstance(value, dict):
            raise UserError(f"{self.path}, record {row} is not a JSON object", "write one object per line")
        return value


def lines_of(path: Path) -> tuple[Ints, Ints]:
    """Start and end offsets of all nonempty lines, in bytes."""
    breaks, size = [], 0
    fix = "correct the path of the data"
    with file_errors(f"{path} cannot be read", fix), open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            breaks.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + size)
            size += len(block)
    ends = np.concatenate([*breaks, [size]]).astype(np.int64)
    begins = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    full = ends > begins + 1  # at least one byte; a lone carriage return has length 1
    return begins[full], ends[full]


IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
WHOLE_NUMBERS = ("cls", "cls2", "index", "inx", "id", "count")
"""Extensions that hold an integer as text, as in WebDataset."""


class TarShard:
    """The samples of one uncompressed tar file: consecutive files with the same name up to the first dot form one."""

    def __init__(self, path: Path) -> None:
        self.path: str | Path = path
        try:
            self.file = UnchangedFile(path)
            self.samples = index_of(path)
        except (OSError, tarfile.TarError) as error:
            fix = "give tars without compression"
            raise refusal(error, f"{path} is not a tar file, or is damaged: {error}", fix) from error

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, rows: list[int]) -> list[dict[str, Any]]:
        parts = [place for row in rows for place in self.samples[row][1].values()]
        contents = iter(self.file.read(parts))
        found: list[dict[str, Any]] = []
        for key, places in map(self.samples.__getitem__, rows):
            found.append({KEY: key, **dict(zip(places, contents, strict=False))})
        return found

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


def decoded(extension: str, content: bytes, where: str) -> Array:
    """Decode a file's content to an array by its extension; nothing is unpickled."""
    kind = extension.rpartition(".")[2]
    readers: dict[str, Callable[[bytes], Any]] = {
        "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
        "json": json.loads,
        **dict.fromkeys(WHOLE_NUMBERS, int),
        **dict.fromkeys(IMAGES, picture),
    }
    if kind not in readers:
        fix = "give open_dataset(..., decode=function), or name only the fields to use"
        raise UserError(f"{where}.{extension} is of a kind that needs a function to decode it", fix)
    try:
        return np.asarray(readers[kind](content))
    except (ValueError, OSError) as error:
        raise UserError(f"{where}.{extension} cannot be read: {error}", "write it again") from error


def picture(content: bytes) -> Bytes:
    """Decode an image to uint8[height, width, 3]."""
    with requires("pillow", "data"):
        from PIL import Image
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))

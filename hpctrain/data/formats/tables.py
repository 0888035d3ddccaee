"""Tables that Arrow reads, as parts that can be read by themselves: row groups of Parquet files, or whole files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from hpctrain.config.values import refuse_credentials
from hpctrain.data.dataset import Dataset
from hpctrain.errors import UserError, requires

BATCH_ROWS = 8192
CSV_BLOCK_BYTES = 4 * 2**20
"""Of a CSV file, parsed at once; longer lines are refused."""
LOOKING_THREADS = 16
"""That ask for the sizes and footers of files: a store takes long to answer, and answers many at once."""
FORMATS = {"parquet": "Parquet", "csv": "CSV", "json": "JSON lines", "orc": "ORC"}
"""Kinds of files by their name for Arrow, and for people."""

Scan = Callable[[Sequence[str], Any], Iterator[Any]]
"""scan(columns, filter) gives Arrow's record batches in order; filter is an Arrow expression of some of these columns,
or None for all rows."""


@dataclass(frozen=True)
class Part:
    """Rows that are read together."""

    where: str
    """Its file, for people."""
    key: str
    """Of its content: another one has another key."""
    rows: int | None
    """None if only reading them tells."""
    scan: Scan


@dataclass(frozen=True)
class Table:
    """A table as it is at one moment."""

    address: str
    """That opens it again as it is, if it has versions."""
    schema: Any
    """Arrow's."""
    parts: Sequence[Part]
    """In order."""
    origin: Mapping[str, Any]
    """What it is, for the record: ``kind``, ``uri``, ``files`` (number), ``files_sha256`` of their names and sizes, and
    of their ETags if a store has them; JSON-able."""
    is_remote: bool
    """Whether its files are in a store."""

    @property
    def is_versioned(self) -> bool:
        """Whether its origin identifies what is in it."""
        return self.is_remote or not {"version", "snapshot"}.isdisjoint(self.origin)

    def record(self, rows: int) -> dict[str, Any]:
        """Its origin, number of rows and schema, for the record."""
        return {**self.origin, "rows": rows, "schema": {field.name: str(field.type) for field in self.schema}}


def open_files(address: str, kind: str) -> Table:
    """The files of a path or URI, of a folder all in it and below, in the order of their names.

    Args:
        address: a path, or a URI that Arrow or fsspec knows, such as ``s3://bucket/folder``.
        kind: parquet, csv, json or orc.

    Raises:
        UserError: it is missing, cannot be read, is damaged, or is a Delta table but not said to be one.
    """
    with reading(address, kind):
        from pyarrow import dataset, fs

        store, path = filesystem_of(address)
        folder = store.get_file_info(path).type == fs.FileType.Directory
        if folder and store.get_file_info(f"{path}/_delta_log").type == fs.FileType.Directory:
            raise UserError(
                f"{address} is a Delta table, whose files do not all count",
                "pack it with --kind delta, or train on delta:PATH",
            )
        form = csv_form(address) if kind == "csv" else kind
        files = dataset.dataset(path, filesystem=store, format=form, partitioning="hive" if folder else None)
        if kind == "csv":  # as text: hpctrain.data.packing.table says what it is
            schema = text_schema(files.schema.names)
            files = dataset.dataset(path, filesystem=store, format=form, schema=schema)
        return table_of(files, address, {"kind": kind, "uri": address}, is_remote(address))


def is_remote(address: str) -> bool:
    """Whether a path or URI leads to a store."""
    return "://" in address and urlsplit(address).scheme != "file"


def filesystem_of(address: str) -> tuple[Any, str]:
    """Arrow's file system, and the path there. Credentials come from where the store's library looks for them."""
    from pyarrow import ArrowInvalid, fs

    if "://" not in address:
        return fs.LocalFileSystem(), str(Path(address).expanduser())
    refuse_credentials(address, "the address of the data")
    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(address)
    except ArrowInvalid as refusal:
        try:
            found = fs.FileSystem.from_uri(f"fsspec+{address}")
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{address} cannot be opened: {shortened(refusal)}; {shortened(error)}",
                "correct the address, or install the plug-in of fsspec for this store",
            ) from error
    return found


@contextlib.contextmanager
def reading(where: str, kind: str) -> Iterator[None]:
    """Raises UserError for what goes wrong while a table is read."""
    with requires("pyarrow", "data"):
        import pyarrow
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{where} does not exist: {shortened(error)}", "correct the path of the data") from error
    except pyarrow.ArrowException as error:
        what = f"{where} is not {FORMATS.get(kind, kind)}, or is damaged: {shortened(error)}"
        raise UserError(what, "correct it, or make it again") from error
    except UnicodeDecodeError as error:
        raise not_utf8(where) from error
    except OSError as error:
        raise UserError(
            f"{where} cannot be read, or is damaged: {shortened(error)}",
            "check the file, the connection to the store, and the credentials that its library uses",
        ) from error


def shortened(error: Exception) -> str:
    """Its first line, without what Arrow did before it found the fault."""
    return str(error).partition("\n")[0].rpartition("Invalid: ")[2][:600]


def not_utf8(where: str) -> UserError:
    """The error for text in another encoding."""
    return UserError(f"{where} is not text in UTF-8", "save it as UTF-8, such as: iconv -f latin1 -t utf-8")


def csv_form(address: str) -> Any:
    """How CSV files are parsed; tabs stand between values if the suffix is .tsv."""
    from pyarrow import csv, dataset

    delimiter = "\t" if address.lower().endswith(".tsv") else ","
    return dataset.CsvFileFormat(
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        read_options=csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False),
    )


def text_schema(names: Sequence[str]) -> Any:
    """Of columns as text, undecoded."""
    import pyarrow

    return pyarrow.schema([(name, pyarrow.binary()) for name in names])


@dataclass(frozen=True)
class SeenFile:
    """A file of a store as it was when the table was opened."""

    store: Any
    path: str
    identity: tuple[Any, ...]
    """What changes with its content: size and time, or size and ETag."""

    @classmethod
    def look(cls, store: Any, path: str) -> SeenFile:
        """At the file as it is now."""
        return cls(store, path, identity_of(store, path))

    def check(self) -> None:
        """Raises UserError if it is another now."""
        if identity_of(self.store, self.path) != self.identity:
            raise UserError(f"{self.path} has changed since the run opened it", "do not change data during a run")


def identity_of(store: Any, path: str) -> tuple[Any, ...]:
    """Size, and ETag or time of the last change."""
    with store.open_input_file(path) as file:
        said = file.metadata() or {}
        if "ETag" in said:
            return file.size(), said["ETag"].decode()
    info = store.get_file_info(path)
    return info.size, info.mtime_ns


def table_of(files: Any, address: str, origin: Mapping[str, Any], remote: bool) -> Table:
    """The table of one of Arrow's data sets of files."""
    from pyarrow.dataset import ParquetFileFragment

    fragments = sorted(files.get_fragments(), key=lambda fragment: str(fragment.path))
    store = files.filesystem

    def look(fragment: Any) -> SeenFile:
        seen = SeenFile.look(store, fragment.path)
        if isinstance(fragment, ParquetFileFragment):
            fragment.ensure_complete_metadata()
        return seen

    with ThreadPoolExecutor(LOOKING_THREADS) as threads:
        seen = list(threads.map(look, fragments))
    parts = []
    for fragment, file in zip(fragments, seen, strict=True):
        if file.identity[0] == 0:
            continue
        if isinstance(fragment, ParquetFileFragment):
            groups = [(group, group.row_groups[0].num_rows) for group in fragment.split_by_row_group()]
        else:
            groups = [(fragment, None)]
        parts += [
            Part(file.path, f"{file.path} {file.identity} {number}", rows, scan_of(group, files.schema, file))
            for number, (group, rows) in enumerate(groups)
            if rows != 0
        ]
    listed = [(file.path, *file.identity) for file in seen]
    listing = {"files": len(listed), "files_sha256": checksum(listed)}
    return Table(address, files.schema, parts, {**origin, **listing}, remote)


def relative(paths: Sequence[str]) -> list[str]:
    """The paths below the folder that all lie in."""
    folder = os.path.commonpath([posixpath.dirname(path) for path in paths])
    return [path[len(folder) :].lstrip("/") for path in paths]


def checksum(files: Sequence[tuple[Any, ...]]) -> str:
    """Of names, sizes and ETags; times of last changes do not count, which a copy does not keep."""
    names = relative([path for path, *_ in files]) if files else []
    marks = [f"{size} {mark}" if isinstance(mark, str) else f"{size}" for _, size, mark in files]
    lines = (f"{name} {mark}\n" for name, mark in zip(names, marks, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def listed_fingerprint(dataset: Dataset, address: str, origin: Mapping[str, Any]) -> str:
    """The address, and a hash of fields, length, and sizes and ETags of the files of a store."""
    identity = f"{len(dataset)} {dict(dataset.fields)} {origin['files_sha256']}"
    return f"{address} {hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def scan_of(fragment: Any, schema: Any, file: SeenFile) -> Scan:
    """Reads a file, or a part of one, that has not changed since."""
    import pyarrow

    def scan(columns: Sequence[str], expression: Any) -> Iterator[Any]:
        scanner = fragment.scanner(
            schema=schema, columns=list(columns), filter=expression, batch_size=BATCH_ROWS, batch_readahead=2
        )
        try:
            yield from scanner.to_batches()
        except (OSError, pyarrow.ArrowException):
            file.check()  # what was made of half of one file and half of another is not damaged
            raise
        file.check()

    return scan


def filtered(batch: Any, expression: Any) -> list[Any]:
    """The rows of a batch that meet a condition."""
    import pyarrow

    if expression is None:
        return [batch]
    batches: list[Any] = pyarrow.Table.from_batches([batch]).filter(expression).to_batches()
    return batches


def values(column: Any, what: str, begin: int) -> NDArray[Any]:
    """An Arrow array as a NumPy array; lists become further axes."""
    from pyarrow import compute, types

    if column.null_count:
        row = begin + column.is_null().index(True).as_py()
        raise UserError(f"{what} has no value in row {row}", "fill it in, or choose columns with --field")
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array
    lengths = np.unique(compute.list_value_length(column).to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise UserError(f"{what} has lists of {lengths[0]} to {lengths[-1]} values", "pad them to one length")
    inner = values(column.flatten(), what, begin)
    return inner.reshape(len(column), int(lengths[0]), *inner.shape[1:])

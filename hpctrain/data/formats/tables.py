"""Tables that Arrow reads, by address, in parts that can be read alone: row groups of Parquet, or whole files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpctrain.config.values import refuse_credentials
from hpctrain.data.formats.arrow_values import require_exact, unified
from hpctrain.data.formats.away import noticing, retry_store
from hpctrain.errors import UserError, requires

BATCH_ROWS = 8192
CSV_BLOCK_BYTES = 4 * 2**20
"""Bytes of a CSV file that are parsed at once; longer lines are an error."""
LOOKING_THREADS = 16
"""Threads that request sizes and footers of files, because object stores have a high latency."""
FORMATS = {"parquet": "Parquet", "csv": "CSV", "json": "JSON lines", "orc": "ORC"}
"""Display names of file kinds by their name in Arrow."""

ADVICE = {
    "duplicate field names": ("has two columns of the same name", "rename one of them"),
    "Unable to merge": ("has a column with the name of a key of its folders", "leave that column out of the files"),
    "Expected all lists": ("has rows without a value in a column of lists of fixed size", "fill them in"),
}
"""What is wrong with a table, and how to fix it, by a part of Arrow's message."""

Scan = Callable[[Sequence[str]], Iterator[Any]]
"""scan(columns) yields Arrow record batches in order."""


@dataclass(frozen=True)
class TablePart:
    """Rows of a table that are read together."""

    where: str
    """Its file, for display."""
    key: str
    """Identifies the content."""
    rows: int | None
    """Number of rows; None if it is unknown before they are read."""
    scan: Scan


@dataclass(frozen=True)
class Table:
    """A snapshot of a table."""

    address: str
    """Opens the same table again."""
    schema: Any
    """An Arrow schema."""
    parts: Sequence[TablePart]
    """In row order."""
    origin: Mapping[str, Any]
    """JSON values for the run's record: ``kind``, ``uri``, ``files`` (their number), and ``files_sha256`` of names,
    sizes and, if the store has them, ETags."""
    is_remote: bool
    """Whether its files are in an object store."""
    clashes: Mapping[str, str] = field(default_factory=dict)
    """Why a column cannot be read, by name: its files hold types that no type holds without loss."""

    def require(self, names: Sequence[str]) -> None:
        """Raise UserError if one of these columns has different types in different files."""
        for name in names:
            if name in self.clashes:
                raise UserError(self.clashes[name], "write all files with one type, or name only other columns")

    def rows_of(self, part: TablePart) -> int:
        """Rows of a part, counted if its file does not record them."""

        def count() -> int:
            with reading(self.address, str(self.origin["kind"]), self.is_remote):
                return sum(len(batch) for batch in part.scan(self.schema.names[:1]))

        return retry_store(count) if part.rows is None else part.rows

    def record(self, rows: int) -> dict[str, Any]:
        """Origin, number of rows and schema, for the run's record."""
        return {**self.origin, "rows": rows, "schema": {field.name: str(field.type) for field in self.schema}}


def open_table(address: str, kind: str) -> Table:
    """Open a table of files of this kind; see ``open_files``."""
    return retry_store(lambda: open_files(address, kind))


def open_files(address: str, kind: str) -> Table:
    """Open the file at a path or URI as a table, or all files in a folder and its subfolders, in order of their names.

    Args:
        address: a path, or a URI that Arrow or fsspec supports, such as ``s3://bucket/folder``.
        kind: parquet, csv, json or orc.

    Raises:
        UserError: it is missing, unreadable or damaged, or it is the folder of a Delta table.
    """
    with reading(address, kind, is_remote(address)):
        import pyarrow
        from pyarrow import dataset, fs

        store, path = filesystem_of(address)
        folder = store.get_file_info(path).type == fs.FileType.Directory
        if folder and store.get_file_info(f"{path}/_delta_log").type == fs.FileType.Directory:
            fix = "write the version that you want as Parquet: deltalake and pyarrow.dataset.write_dataset do so"
            raise UserError(f"{address} is a Delta table, whose files do not all count", fix)
        form = csv_form(address) if kind == "csv" else kind
        files = dataset.dataset(path, filesystem=store, format=form, partitioning="hive" if folder else None)
        if kind == "csv":  # read as bytes; hpctrain.data.packing.table infers the types
            schema = pyarrow.schema([(name, pyarrow.binary()) for name in files.schema.names])
            files = dataset.dataset(path, filesystem=store, format=form, schema=schema)
        return table_of(files, address, {"kind": kind, "uri": address}, is_remote(address))


def is_remote(address: str) -> bool:
    """Whether a path or URI refers to an object store."""
    return "://" in address and urlsplit(address).scheme != "file"


def filesystem_of(address: str) -> tuple[Any, str]:
    """The Arrow file system and the path in it. The store's library finds credentials in its usual places."""
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
            fix = "correct the address, or install the plug-in of fsspec for this store"
            raise UserError(f"{address} cannot be opened: {shortened(refusal)}; {shortened(error)}", fix) from error
    return found


@contextlib.contextmanager
def reading(where: str, kind: str, remote: bool = False) -> Iterator[None]:
    """Turn errors while a table is read into UserErrors, or StoreDown."""
    with requires("pyarrow", "data"):
        import pyarrow
    try:
        with noticing(where, remote):
            yield
    except FileNotFoundError as error:
        raise UserError(f"{where} does not exist: {shortened(error)}", "correct the path of the data") from error
    except pyarrow.ArrowException as error:
        known = next((advice for text, advice in ADVICE.items() if text in str(error)), None)
        what, fix = known or (f"is not {FORMATS.get(kind, kind)}, or is damaged", "correct it, or make it again")
        raise UserError(f"{where} {what}: {shortened(error)}", fix) from error
    except UnicodeDecodeError as error:
        raise not_utf8(where) from error
    except OSError as error:
        fix = "check the file, the connection to the store, and the credentials that its library uses"
        raise UserError(f"{where} cannot be read, or is damaged: {shortened(error)}", fix) from error


def shortened(error: Exception) -> str:
    """The first line of an error, without Arrow's prefix."""
    return str(error).partition("\n")[0].rpartition("Invalid: ")[2][:600]


def not_utf8(where: str) -> UserError:
    """The error for text in another encoding."""
    return UserError(f"{where} is not text in UTF-8", "save it as UTF-8, such as: iconv -f latin1 -t utf-8")


def csv_form(address: str) -> Any:
    """The Arrow format for CSV files, with tabs as delimiter if the suffix is .tsv."""
    from pyarrow import csv, dataset

    delimiter = "\t" if address.lower().endswith(".tsv") else ","
    return dataset.CsvFileFormat(
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        read_options=csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False),
    )


@dataclass(frozen=True)
class SeenFile:
    """A file of a table, with its state when the table was opened."""

    store: Any
    path: str
    identity: tuple[Any, ...]
    """Changes with the content: size and modification time, or size and ETag."""

    def check(self) -> None:
        """Raise UserError if the file has changed."""
        if identity_of(self.store, self.path) != self.identity:
            raise UserError(f"{self.path} has changed since the run opened it", "do not change data during a run")


def identity_of(store: Any, path: str) -> tuple[Any, ...]:
    """Size, and ETag or modification time."""
    with store.open_input_file(path) as file:
        said = file.metadata() or {}
        if "ETag" in said:
            return file.size(), said["ETag"].decode()
    info = store.get_file_info(path)
    return info.size, info.mtime_ns


def table_of(files: Any, address: str, origin: Mapping[str, Any], remote: bool) -> Table:
    """Make a Table of an Arrow dataset of files."""
    from pyarrow.dataset import ParquetFileFragment

    fragments = sorted(files.get_fragments(), key=lambda fragment: str(fragment.path))
    store = files.filesystem

    def look(fragment: Any) -> tuple[SeenFile, Any]:
        file = SeenFile(store, fragment.path, identity_of(store, fragment.path))
        if isinstance(fragment, ParquetFileFragment):
            fragment.ensure_complete_metadata()
        is_text = origin["kind"] == "csv" or not file.identity[0]
        return file, files.schema if is_text else fragment.physical_schema

    with ThreadPoolExecutor(LOOKING_THREADS) as threads:
        looked = list(threads.map(look, fragments))
    seen = [file for file, _ in looked]
    schema, clashes = unified(files.schema, [(file.path, schema) for file, schema in looked])
    parts = []
    for fragment, file in zip(fragments, seen, strict=True):
        if file.identity[0] == 0:
            continue
        begin = 0
        is_split = isinstance(fragment, ParquetFileFragment)
        for number, group in enumerate(fragment.split_by_row_group() if is_split else [fragment]):
            rows = group.row_groups[0].num_rows if is_split else None
            if rows != 0:
                key = f"{file.path} {file.identity} {number}"
                parts.append(TablePart(file.path, key, rows, scan_of(group, schema, file, begin)))
            begin += rows or 0
    listed = [(file.path, *file.identity) for file in seen]
    listing = {"files": len(listed), "files_sha256": checksum(listed)}
    return Table(address, schema, parts, {**origin, **listing}, remote, clashes)


def checksum(files: Sequence[tuple[Any, ...]]) -> str:
    """sha256 of sizes, ETags, and names in the common folder; no modification times, which a copy does not keep."""
    folder = os.path.commonpath([posixpath.dirname(path) for path, *_ in files]) if files else ""
    digest = hashlib.sha256()
    for path, size, mark in files:
        etag = f" {mark}" if isinstance(mark, str) else ""
        digest.update(f"{path[len(folder) :].lstrip('/')} {size}{etag}\n".encode())
    return digest.hexdigest()


def scan_of(fragment: Any, schema: Any, file: SeenFile, begin: int) -> Scan:
    """Make a scan of a file or part of one, from row ``begin`` of the file on.

    It raises UserError if the file has changed since, or holds a value that would change in the table's type.
    """
    import pyarrow

    def scan(columns: Sequence[str]) -> Iterator[Any]:
        scanner = fragment.scanner(schema=schema, columns=list(columns), batch_size=BATCH_ROWS, batch_readahead=2)
        try:
            yield from scanner.to_batches()
        except (OSError, pyarrow.ArrowException):
            file.check()  # a changed file may look damaged
            for name in {*columns} & {*fragment.physical_schema.names}:
                require_exact(fragment, name, schema.field(name).type, begin)
            raise
        file.check()

    return scan

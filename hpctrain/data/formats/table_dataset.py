"""Tables as datasets: parts are decoded whole and cached, on the node's disk if remote, else in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Field, Samples, check_field, choose, content_fingerprint
from hpctrain.data.formats.arrow_values import values
from hpctrain.data.formats.away import patiently
from hpctrain.data.formats.block_cache import BlockCache, DiskCache
from hpctrain.data.formats.records import Decode, open_records
from hpctrain.data.formats.segments import SEGMENT_BYTES, Segments
from hpctrain.data.formats.tables import Table, TablePart, listed_fingerprint, reading
from hpctrain.data.samples import grouped
from hpctrain.errors import UserError
from hpctrain.system.files import replacement

ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Run:
    """Consecutive parts of a table that are cached in one segment, column by column."""

    first: int
    last: int
    """Exclusive."""
    begin: int
    """Its first row in the table."""
    rows: int
    places: Mapping[str, int]
    """Offset of each column in bytes."""
    length: int
    key: str
    """Identifies the decoded content, so it covers the column types."""


class TableDataset:
    """The rows of a table as samples. Create it with ``open_table_dataset``, which checks the table."""

    def __init__(self, table: Table, ends: NDArray[np.int64], fields: Mapping[str, Field], cache: BlockCache) -> None:
        self.table = table
        self.ends = ends
        self.fields = fields
        self.segments = Segments(cache, DiskCache.of_node() if table.is_remote else None)
        self.runs: dict[tuple[int, int], Run] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, indices: NDArray[np.int64]) -> Samples:
        return self.segments.read(lambda: self._read(indices))

    def _read(self, indices: NDArray[np.int64]) -> Samples:
        num_bytes = len(self) * sum(field.num_bytes for field in self.fields.values())
        count = max(1, SEGMENT_BYTES * len(self.ends) // max(1, num_bytes)) if self.segments.disk else 1
        if len(indices):
            least, most = self._parts((indices.min(), indices.max())) // count
            if least == most:
                return self._within(self._run(int(least), count), indices)
        samples = {name: field.make_rows(len(indices)) for name, field in self.fields.items()}
        for number, rows in grouped(self._parts(indices) // count):
            for name, found in self._within(self._run(number, count), indices[rows]).items():
                samples[name][rows] = found
        return samples

    def _parts(self, indices: Any) -> NDArray[np.int64]:
        """Numbers of the parts that hold these samples."""
        found: NDArray[np.int64] = np.searchsorted(self.ends, indices, side="right")
        return found

    def _begin(self, part: int) -> int:
        return int(self.ends[part - 1]) if part else 0

    def _run(self, number: int, count: int) -> Run:
        """Run ``number``, if runs have ``count`` parts each."""
        if (number, count) not in self.runs:
            first, last = number * count, min((number + 1) * count, len(self.ends))
            rows, places, length = int(self.ends[last - 1]) - self._begin(first), {}, 0
            for name, field in self.fields.items():
                places[name] = length
                length += -(-rows * field.num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
            types = [(name, str(self.table.schema.field(name).type)) for name in self.fields]
            key = f"{' '.join(part.key for part in self.table.parts[first:last])} {types}"
            self.runs[number, count] = Run(first, last, self._begin(first), rows, places, max(1, length), key)
        return self.runs[number, count]

    def _within(self, run: Run, indices: NDArray[np.int64]) -> Samples:
        """Read samples of one run."""

        def wanted(marks: NDArray[np.uint8]) -> NDArray[np.int64]:
            return np.unique(self._parts(indices)) - run.first

        def make(piece: int) -> list[tuple[int, memoryview]]:
            row = self._begin(run.first + piece) - run.begin
            arrays = self._decoded(run.first + piece).items()
            return [
                (run.places[name] + row * self.fields[name].num_bytes, each.reshape(-1).view(np.uint8).data)
                for name, each in arrays
            ]

        segment = self.segments.get(run.key, run.length, run.last - run.first, wanted, make)
        samples = {}
        for name, field in self.fields.items():
            rows = segment.array((run.rows, *field.shape), field.dtype, run.places[name])
            samples[name] = rows.take(indices - run.begin, axis=0)
        return samples

    def _decoded(self, number: int) -> dict[str, NDArray[Any]]:
        """Decode the columns of a part; raises UserError if rows or shapes do not match the table."""
        part, begin = self.table.parts[number], self._begin(number)
        rows = int(self.ends[number]) - begin
        arrays = columns_of(self.table, part, tuple(self.fields), begin)
        for name, array in arrays.items():
            if len(array) != rows:
                fix = "do not change data during a run"
                raise UserError(f"{part.where} gave {len(array)} rows in place of {rows}", fix)
            if array.shape[1:] != self.fields[name].shape:
                raise UserError(
                    f"{part.where}: column {name!r} has values of shape {array.shape[1:]}, those before them have "
                    f"{self.fields[name].shape}",
                    "pad them to one length, or give the task a collate, which takes them as they are",
                )
        return {name: np.ascontiguousarray(array, self.fields[name].dtype) for name, array in arrays.items()}

    def fingerprint(self) -> str:
        """A hash of the file listing for a remote table, else of samples."""
        if not self.table.is_remote:
            return content_fingerprint(self)
        return listed_fingerprint(self, self.table.address, self.table.origin)


def columns_of(table: Table, part: TablePart, names: tuple[str, ...], begin: int) -> dict[str, NDArray[Any]]:
    """Read columns of a part as NumPy arrays."""
    if not names:
        return {}
    rows = read_part(table, part, names)
    return {name: values(rows.column(name), f"{part.where}: column {name!r}", begin) for name in names}


def read_part(table: Table, part: TablePart, names: Sequence[str]) -> Any:
    """Read columns of a part as an Arrow record batch. Failed reads of a remote table are retried."""
    import pyarrow

    def read() -> Any:
        with reading(part.where, str(table.origin["kind"]), table.is_remote):
            rows = pyarrow.Table.from_batches(list(part.scan(names, None))).combine_chunks()
        return pyarrow.RecordBatch.from_arrays([rows.column(name).chunk(0) for name in names], names=list(names))

    return patiently(read)


def open_table_dataset(
    table: Table, names: tuple[str, ...] | None, cache: BlockCache, ragged: bool, decode: Decode | None
) -> Dataset:
    """Make a dataset of a table's rows.

    Raises:
        UserError: the table has no rows, or a column cannot be trained on.
    """
    counts = [patiently(partial(rows_of, part, table)) for part in table.parts]
    ends = np.cumsum(counts, dtype=np.int64)
    if not len(ends) or not ends[-1]:
        raise UserError(f"{table.address} holds no rows", "give data with at least one sample")
    if decode is not None or ragged:
        return open_records(TableRows(table, ends, cache), decode, names, ragged)
    chosen = choose(table.schema.names, names, table.address)
    table.require(chosen)
    for name in chosen:
        check_type(name, table)
    known = {name: field_of(table.schema.field(name).type) for name in chosen}
    filled = table.parts[int(np.argmax(ends > 0))]
    first = columns_of(table, filled, tuple(name for name in chosen if known[name] is None), 0)
    fields = {
        name: known[name] or check_field(name, first[name].shape, first[name].dtype, table.address) for name in chosen
    }
    return TableDataset(table, ends, fields, cache)


def field_of(kind: Any) -> Field | None:
    """The field of a column, from its Arrow type; None if it depends on the values."""
    from pyarrow import types

    if types.is_fixed_size_list(kind):
        inner = field_of(kind.value_type)
        return inner and Field((kind.list_size, *inner.shape), inner.dtype)
    return None if types.is_nested(kind) else Field((), np.dtype(kind.to_pandas_dtype()))


def rows_of(part: TablePart, table: Table) -> int:
    """Rows of a part, counted if its file does not record them."""
    if part.rows is not None:
        return part.rows
    with reading(table.address, str(table.origin["kind"]), table.is_remote):
        return sum(len(batch) for batch in part.scan(table.schema.names[:1], None))


def check_type(name: str, table: Table) -> None:
    """Raise UserError if a column does not hold numbers, booleans or lists of them."""
    from pyarrow import types

    kind = table.schema.field(name).type
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        fix = "encode it: open_dataset(..., decode=function), or name only the fields to use"
        raise UserError(f"{table.address}: column {name!r} holds {kind}", fix)


@dataclass(eq=False)
class TableRows:
    """The rows of a table as records, for ``decode`` and ragged data."""

    table: Table
    ends: NDArray[np.int64]
    cache: BlockCache

    def __post_init__(self) -> None:
        self.path: str | Path = self.table.address
        self.disk = DiskCache.of_node() if self.table.is_remote else None

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self._row(row) for row in rows]

    def plain(self, record: dict[str, Any]) -> Any:
        for name, value in record.items():
            if value is None or isinstance(value, (str, bytes)):
                fix = "encode it: open_dataset(..., decode=function), or name only the fields to use"
                raise UserError(f"{self.path}: column {name!r} holds {'no value' if value is None else 'text'}", fix)
        return record

    def _row(self, row: int) -> dict[str, Any]:
        index = int(np.searchsorted(self.ends, row, side="right"))
        part = self.table.parts[index]
        rows = self.cache.get((part.key, "rows"), lambda: self._rows(part))
        place = row - (int(self.ends[index - 1]) if index else 0)
        return {name: plain_value(rows.column(name)[place]) for name in rows.schema.names}

    def _rows(self, part: TablePart) -> Any:
        made: list[Any] = []

        def write(path: Path) -> None:
            made.append(read_part(self.table, part, self.table.schema.names))
            write_rows(path, made[0])

        if self.disk is not None:
            with contextlib.suppress(UserError, OSError):
                return self.disk.get(f"{part.key} {self.table.schema}", write, mapped_rows)
        return made[0] if made else read_part(self.table, part, self.table.schema.names)


def write_rows(path: Path, rows: Any) -> None:
    """Write a record batch to an Arrow file that can be memory-mapped. Raises OSError."""
    from pyarrow import ipc

    with replacement(path) as temporary, ipc.new_file(str(temporary), rows.schema) as file:
        file.write_batch(rows)


def mapped_rows(path: Path) -> Any:
    """Map a file of ``write_rows``; raises UserError if it is damaged."""
    import pyarrow
    from pyarrow import ipc

    try:
        return ipc.open_file(pyarrow.memory_map(str(path))).get_batch(0)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is damaged: {error}", "remove it") from error


def plain_value(scalar: Any) -> Any:
    """Convert an Arrow scalar: numbers keep their dtype, flat lists become arrays, other values Python objects."""
    import pyarrow

    if (
        isinstance(scalar, pyarrow.ListScalar)
        and scalar.is_valid
        and not pyarrow.types.is_nested(scalar.type.value_type)
    ):
        return scalar.values.to_numpy(zero_copy_only=False)
    value = scalar.as_py()
    if isinstance(value, (bool, int, float)):
        return np.asarray(value, scalar.type.to_pandas_dtype())
    return value

"""Tables as datasets: parts are decoded whole and kept in memory, the most recently used ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.dataset import Dataset, Field, Samples, check_field, choose, content_fingerprint
from hpctrain.data.formats.arrow_values import values
from hpctrain.data.formats.away import retry_store
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.records import Decode, open_records
from hpctrain.data.formats.tables import Table, TablePart, reading
from hpctrain.data.samples import grouped
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array, Ints


@dataclass(frozen=True)
class DecodedPart:
    """The columns of a part, with the dtypes of the dataset's fields."""

    columns: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(array.nbytes for array in self.columns.values())


@dataclass(frozen=True, eq=False)
class TableDataset:
    """The rows of a table as samples. Create it with ``open_table_dataset``, which checks the table."""

    table: Table
    ends: Ints
    """Index of the first row after each part."""
    fields: Mapping[str, Field]
    cache: BlockCache

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, indices: Ints) -> Samples:
        samples = {name: field.make_rows(len(indices)) for name, field in self.fields.items()}
        for number, rows in grouped(np.searchsorted(self.ends, indices, side="right")):
            begin, part = begin_of(self.ends, number), self._part(number)
            for name, column in part.columns.items():
                samples[name][rows] = column[indices[rows] - begin]
        return samples

    def _part(self, number: int) -> DecodedPart:
        key = self.table.parts[number].key, tuple(self.fields)
        return self.cache.get(key, lambda: self._decoded(number))

    def _decoded(self, number: int) -> DecodedPart:
        """Decode the columns of a part; raises UserError if rows or shapes do not match the table."""
        part, begin = self.table.parts[number], begin_of(self.ends, number)
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
        return DecodedPart(
            {name: np.array(array, self.fields[name].dtype, order="C") for name, array in arrays.items()}
        )

    def fingerprint(self) -> str:
        """A hash of the file listing for a remote table, else of samples."""
        if not self.table.is_remote:
            return content_fingerprint(self)
        listed = f"{len(self)} {dict(self.fields)} {self.table.origin['files_sha256']}"
        return f"{self.table.address} {hashlib.sha256(listed.encode()).hexdigest()[:16]}"


def begin_of(ends: Ints, part: int) -> int:
    """Index of a part's first row, given those after each part's last."""
    return int(ends[part - 1]) if part else 0


def columns_of(table: Table, part: TablePart, names: tuple[str, ...], begin: int) -> dict[str, Array]:
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
            rows = pyarrow.Table.from_batches(list(part.scan(names))).combine_chunks()
        return pyarrow.RecordBatch.from_arrays([whole(rows, name, part) for name in names], names=list(names))

    return retry_store(read)


def whole(rows: Any, name: str, part: TablePart) -> Any:
    """A column of a table with combined chunks as one Arrow array."""
    column = rows.column(name)
    if column.num_chunks > 1:
        fix = "write it again with smaller row groups: pyarrow.parquet.write_table(..., row_group_size=...)"
        raise UserError(f"{part.where}: column {name!r} has more than 2 GiB of values in a row group", fix)
    return column.chunk(0)


def open_table_dataset(
    table: Table, names: tuple[str, ...] | None, cache: BlockCache, ragged: bool, decode: Decode | None
) -> Dataset:
    """Make a dataset of a table's rows.

    Raises:
        UserError: the table has no rows, or a column cannot be trained on.
    """
    ends = np.cumsum([table.rows_of(part) for part in table.parts], dtype=np.int64)
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
    ends: Ints
    cache: BlockCache

    def __post_init__(self) -> None:
        self.path: str | Path = self.table.address

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
        number = int(np.searchsorted(self.ends, row, side="right"))
        part, names = self.table.parts[number], self.table.schema.names
        rows = self.cache.get((part.key, "rows"), lambda: read_part(self.table, part, names))
        place = row - begin_of(self.ends, number)
        return {name: plain_value(rows.column(name)[place]) for name in names}


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

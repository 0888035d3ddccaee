"""Tables as sources: columns of numbers, or lists of them, for arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpctrain.data.dataset import Samples, check_field
from hpctrain.data.formats.arrow_values import values
from hpctrain.data.formats.away import retry_items
from hpctrain.data.formats.tables import Table, TablePart, not_utf8, reading
from hpctrain.data.packing.pack_source import Columns, PackSource, assign, gather
from hpctrain.errors import UserError


def typed(table: Table, columns: Sequence[str]) -> Table:
    """Infer the types of these columns of a CSV table.

    All files are read once to infer types and count rows, and again in each scan.

    Raises:
        UserError: there is no header line, text is not UTF-8, or a value is not a number.
    """
    import pyarrow

    names = {name.strip(): name for name in table.schema.names}
    if all(is_number(name) for name in names):
        raise UserError(f"{table.address} has no header line", "add a first line with the names of the columns")
    types = dict.fromkeys(columns, pyarrow.int64())

    def numbers_in(part: TablePart, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        begin = 0
        for batch in part.scan([names[name] for name in wanted]):
            yield {name: numbers(batch.column(names[name]), types[name], part, name, begin) for name in wanted}
            begin += len(batch)

    def typed_part(part: TablePart, rows: int) -> TablePart:
        def scan(wanted: Sequence[str]) -> Iterator[Any]:
            return map(pyarrow.RecordBatch.from_pydict, numbers_in(part, wanted))

        return replace(part, rows=rows, scan=scan)

    counts = []
    for part in table.parts:
        counts.append(0)
        for found in numbers_in(part, columns):
            types |= {name: array.type for name, array in found.items()}
            counts[-1] += len(found[columns[0]])
    parts = [typed_part(part, rows) for part, rows in zip(table.parts, counts, strict=True)]
    return replace(table, schema=pyarrow.schema(list(types.items())), parts=parts)


def numbers(texts: Any, kind: Any, part: TablePart, name: str, begin: int) -> Any:
    """Parse texts as an Arrow array of type ``kind``, int64 or float64, or of float64 if they do not fit.

    Raises:
        UserError: a text is not a number, or not UTF-8.
    """
    import pyarrow
    from pyarrow import compute

    try:
        trimmed = compute.utf8_trim_whitespace(texts.cast(pyarrow.string()))
    except pyarrow.ArrowInvalid as error:
        raise not_utf8(part.where) from error
    with contextlib.suppress(pyarrow.ArrowInvalid):
        floats = trimmed.cast(pyarrow.float64())
        if pyarrow.types.is_floating(kind):
            require_digits(trimmed, floats, part, name, begin)
            return floats
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return trimmed.cast(pyarrow.int64())
        try:  # for example numbers with a plus sign
            return pyarrow.array(np.array(trimmed.to_pylist(), np.int64))
        except (ValueError, OverflowError):
            require_digits(trimmed, floats, part, name, begin)
            return floats
    row, text = next((row, text) for row, text in enumerate(trimmed.to_pylist()) if not is_number(text))
    fix = "fill in or leave out such rows, or choose columns with --field"
    raise UserError(f"{part.where}: column {name!r} has {text!r} in row {begin + row}, which is not a number", fix)


def require_digits(texts: Any, floats: Any, part: TablePart, name: str, begin: int) -> None:
    """Raise UserError if a whole number, such as an identifier, would be rounded to float64."""
    for row in np.flatnonzero(np.abs(floats.to_numpy(zero_copy_only=False)) >= 2.0**53).tolist():
        text = texts[row].as_py()
        if text.lstrip("+-").isdecimal() and int(text) != float(text):
            what = f"{part.where}: column {name!r} has {text} in row {begin + row}, which float64 would round"
            raise UserError(what, "leave it out with --field, or keep the column to whole numbers below 2^63")


def is_number(text: str) -> bool:
    """Whether Arrow parses the text as a number."""
    import pyarrow

    try:
        pyarrow.scalar(text.strip()).cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return False
    return True


def from_table(table: Table, wanted: Columns | None) -> PackSource:
    """A source of a table's columns: numbers, booleans, and (nested) lists of them of equal length in all rows.

    Args:
        table: a result of ``open_table``.
        wanted: the columns of each array, by default one array per column.

    Raises:
        UserError: a column is missing or cannot be trained on, or there are no rows.
    """
    kind = str(table.origin["kind"])
    assigned = assign(wanted, [name.strip() for name in table.schema.names], table.address)
    needed = list(dict.fromkeys(column for columns in assigned.values() for column in columns))
    table.require(needed)
    if kind == "csv":
        with reading(table.address, kind, table.is_remote):
            table = typed(table, needed)
    length = sum(table.rows_of(part) for part in table.parts)

    def batches(part: TablePart) -> Iterator[Any]:
        with reading(table.address, kind, table.is_remote):
            yield from part.scan(needed)

    def blocks() -> Iterator[Samples]:
        begin = 0
        for part in table.parts:
            for batch in retry_items(lambda part=part: batches(part)):  # type: ignore[misc]
                if not len(batch):
                    continue
                where = f"{part.where}: column"
                columns = {name: values(batch.column(name), f"{where} {name!r}", begin) for name in needed}
                yield gather(assigned, columns, begin)
                begin += len(batch)

    first = next(blocks(), None)
    if first is None:
        raise UserError(f"{table.address} holds no rows", "give data with at least one sample")
    fields = {name: check_field(name, array.shape, array.dtype, table.address) for name, array in first.items()}
    return PackSource(fields, length, blocks, {"sources": [table.record(length)]})

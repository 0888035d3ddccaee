"""Tables as sources: selects columns for arrays and filters rows by conditions."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from hpctrain.data.dataset import Samples, check_field
from hpctrain.data.formats.arrow_values import filtered, values
from hpctrain.data.formats.away import patient
from hpctrain.data.formats.tables import Table, TablePart, not_utf8, reading, shortened
from hpctrain.data.packing.pack_source import Columns, PackSource, Piece, assign, gather
from hpctrain.data.packing.resumable_file import ALONE, PATIENCE_S, Ranks
from hpctrain.errors import UserError


def typed(table: Table, columns: Sequence[str], trained: Sequence[str]) -> Table:
    """Infer the types of these columns of a CSV table; columns outside ``trained`` may be text.

    All files are read once to infer types and count rows, and again in each scan.

    Raises:
        UserError: there is no header line, text is not UTF-8, or a value in a ``trained`` column is not a number.
    """
    import pyarrow

    names = {name.strip(): name for name in table.schema.names}
    if all(is_number(name) for name in names):
        raise UserError(f"{table.address} has no header line", "add a first line with the names of the columns")
    types = dict.fromkeys(columns, pyarrow.int64())
    counts = []
    for part in table.parts:
        counts.append(0)
        for batch in part.scan([names[name] for name in types], None):
            for name in types:
                texts = batch.column(names[name])
                types[name] = numbers(texts, types[name], part, name, counts[-1], name not in trained).type
            counts[-1] += len(batch)

    def typed_part(part: TablePart, rows: int) -> TablePart:
        def scan(wanted: Sequence[str], expression: Any) -> Iterator[Any]:
            begin = 0
            for batch in part.scan([names[name] for name in wanted], None):
                made = {
                    name: numbers(batch.column(names[name]), types[name], part, name, begin, name not in trained)
                    for name in wanted
                }
                begin += len(batch)
                yield from filtered(pyarrow.RecordBatch.from_pydict(made), expression)

        return TablePart(part.where, part.key, rows, scan)

    parts = [typed_part(part, rows) for part, rows in zip(table.parts, counts, strict=True)]
    return replace(table, schema=pyarrow.schema(list(types.items())), parts=parts)


def numbers(texts: Any, kind: Any, part: TablePart, name: str, begin: int, or_text: bool) -> Any:
    """Parse texts as an Arrow array of type ``kind``, or of float64 or (if ``or_text``) text if they do not fit.

    Raises:
        UserError: a text is not a number, or not UTF-8.
    """
    import pyarrow
    from pyarrow import compute

    try:
        trimmed = compute.utf8_trim_whitespace(texts.cast(pyarrow.string()))
    except pyarrow.ArrowInvalid as error:
        raise not_utf8(part.where) from error
    if pyarrow.types.is_string(kind):
        return trimmed
    with contextlib.suppress(pyarrow.ArrowInvalid):
        floats = trimmed.cast(pyarrow.float64())
        if pyarrow.types.is_floating(kind):
            return floats
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return trimmed.cast(pyarrow.int64())
        try:  # for example numbers with a plus sign
            return pyarrow.array(np.array(trimmed.to_pylist(), np.int64))
        except (ValueError, OverflowError):
            return floats
    if or_text:
        return trimmed
    row, text = next((row, text) for row, text in enumerate(trimmed.to_pylist()) if not is_number(text))
    fix = "fill in or leave out such rows, or choose columns with --field"
    raise UserError(f"{part.where}: column {name!r} has {text!r} in row {begin + row}, which is not a number", fix)


def is_number(text: str) -> bool:
    """Whether Arrow parses the text as a number."""
    import pyarrow

    try:
        pyarrow.scalar(text.strip()).cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return False
    return True


CONDITION = re.compile(r"\s*(.+?)\s*(==|!=|<=|>=|=|<|>|\sin\s)\s*(.*?)\s*")
COMPARE = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


def from_table(
    table: Table, wanted: Columns | None, conditions: Sequence[str] = (), ranks: Ranks = ALONE
) -> PackSource:
    """A source of a table's columns: numbers, booleans, and (nested) lists of them of equal length in all rows.

    Args:
        table: a result of ``open_table``.
        wanted: the columns of each array, by default one array per column.
        conditions: conditions such as ``age >= 30``; rows must meet all of them.
        ranks: the ranks that make this call together and count rows in parallel.

    Raises:
        UserError: a column is missing or cannot be trained on, a condition cannot be understood, or no row is left.
    """
    kind = str(table.origin["kind"])
    assigned = assign(wanted, [name.strip() for name in table.schema.names], table.address)
    needed = list(dict.fromkeys(column for columns in assigned.values() for column in columns))
    asked = [parsed(condition, table) for condition in conditions]
    compared = list(dict.fromkeys(column for column, _, _ in asked))
    scanned = list(dict.fromkeys([*needed, *compared]))
    table.require(needed)
    with reading(table.address, kind, table.is_remote):
        if kind == "csv":
            table = typed(table, scanned, needed)
        chosen = [expression(*each, table) for each in asked]
        keep = chosen[0] if chosen else None
        for each in chosen[1:]:
            keep &= each

        def count(part: TablePart) -> int:
            if part.rows is not None and keep is None:
                return part.rows
            return sum(len(batch) for batch in scan(part, compared or scanned[:1]))

        def scan(part: TablePart, columns: Sequence[str]) -> Iterator[Any]:
            def begin() -> Iterator[Any]:
                with reading(table.address, kind, table.is_remote):
                    yield from part.scan(columns, keep)

            return patient(begin)

        mine = [count(part) for part in table.parts[ranks.rank :: ranks.size]]
    gathered = ranks.allgather(mine, "count the rows of the table", PATIENCE_S)
    counts = [gathered[index % ranks.size][index // ranks.size] for index in range(len(table.parts))]

    def read(part: TablePart, begin: int) -> Iterator[Samples]:
        for batch in scan(part, scanned):
            if not len(batch):
                continue
            columns = {name: values(batch.column(name), f"{part.where}: column {name!r}", begin) for name in needed}
            yield gather(assigned, columns, begin)
            begin += len(batch)

    begins = [0, *accumulate(counts)]
    made = hashlib.sha256(f"{assigned} {conditions} {table.schema}".encode()).hexdigest()
    pieces = [
        Piece(f"{part.key} {made}", rows, partial(read, part, begin))
        for part, rows, begin in zip(table.parts, counts, begins, strict=False)
        if rows
    ]

    def blocks() -> Iterator[Samples]:
        for piece in pieces:
            yield from piece.blocks()

    first = next(blocks(), None)
    if first is None:
        fix = "give data with at least one sample"
        raise UserError(f"{table.address} holds no rows{' that meet the conditions' if conditions else ''}", fix)
    fields = {name: check_field(name, array.shape, array.dtype, table.address) for name, array in first.items()}
    origin = {**table.record(begins[-1]), **({"filter": list(conditions)} if conditions else {})}
    return PackSource(fields, begins[-1], blocks, {"sources": [origin]}, pieces)


def parsed(condition: str, table: Table) -> tuple[str, str, str]:
    """Parse a condition into column, operator and value."""
    match = CONDITION.fullmatch(condition)
    if not match:
        fix = "write column, operator and value, such as --filter 'age >= 30'"
        raise UserError(f"--filter {condition!r} is not a condition", fix)
    if match[1] not in [name.strip() for name in table.schema.names]:
        fix = f"it has {', '.join(table.schema.names)}: name one of them"
        raise UserError(f"--filter {condition!r}: {table.address} has no column {match[1]!r}", fix)
    return match[1], match[2].strip(), match[3].strip("'\"")


def expression(column: str, operation: str, value: str, table: Table) -> Any:
    """The condition as an Arrow expression, with its value cast to the column's type."""
    import pyarrow
    from pyarrow import compute

    kind = table.schema.field(column).type
    try:
        if operation == "in":
            each = [text.strip(" '\"") for text in value.split(",")]
            return compute.field(column).isin(pyarrow.array(each, pyarrow.string()).cast(kind))
        return COMPARE[operation](compute.field(column), pyarrow.scalar(value).cast(kind))
    except pyarrow.ArrowException as error:
        what = f"--filter compares column {column!r}, which holds {kind}, with {value!r}: {shortened(error)}"
        raise UserError(what, "give a value of the column's type") from error

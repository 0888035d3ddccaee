"""What the text of CSV files stands for: int64 if all values of a column are, else float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpctrain.data.formats.tables import Part, Table, filtered, not_utf8
from hpctrain.errors import UserError


def typed(table: Table, columns: Sequence[str], trained: Sequence[str]) -> Table:
    """The table with types for these columns; those that are not trained on may be text.

    All files are read once for their types and numbers of rows, and once more with each scan.

    Raises:
        UserError: there is no line of names, text is not in UTF-8, or not a number in ``trained``.
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

    def typed_part(part: Part, rows: int) -> Part:
        def scan(wanted: Sequence[str], expression: Any) -> Iterator[Any]:
            begin = 0
            for batch in part.scan([names[name] for name in wanted], None):
                made = {
                    name: numbers(batch.column(names[name]), types[name], part, name, begin, name not in trained)
                    for name in wanted
                }
                begin += len(batch)
                yield from filtered(pyarrow.RecordBatch.from_pydict(made), expression)

        return Part(part.where, part.key, rows, scan)

    parts = [typed_part(part, rows) for part, rows in zip(table.parts, counts, strict=True)]
    return replace(table, schema=pyarrow.schema(list(types.items())), parts=parts)


def numbers(texts: Any, kind: Any, part: Part, name: str, begin: int, or_text: bool) -> Any:
    """Texts as an Arrow array of this type; of float64, or text if that is allowed, if they are something else."""
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
        try:  # numbers with a plus, for instance
            return pyarrow.array(np.array(trimmed.to_pylist(), np.int64))
        except (ValueError, OverflowError):
            return floats
    if or_text:
        return trimmed
    row, text = next((row, text) for row, text in enumerate(trimmed.to_pylist()) if not is_number(text))
    raise UserError(
        f"{part.where}: column {name!r} has {text!r} in row {begin + row}, which is not a number",
        "fill in or leave out such rows, or choose columns with --field",
    )


def is_number(text: str) -> bool:
    """Whether it is one to Arrow."""
    import pyarrow

    try:
        pyarrow.scalar(text.strip()).cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return False
    return True

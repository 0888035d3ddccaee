"""CSV files as sources."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Field, Samples
from hpctrain.data.packing.columns import Columns, assign, gather
from hpctrain.data.packing.source import Source
from hpctrain.errors import UserError

BLOCK_ROWS = 8192
INT64, FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)

Rows = list[tuple[int, list[str]]]
"""Lines of the file, with their numbers."""
Dtypes = dict[str, np.dtype[Any]]


def from_csv(path: Path, wanted: Columns | None) -> Source:
    """The columns of a CSV (or, by its suffix, TSV) file with a header line: int64 if all values are, else float64.

    The file is read twice: once for the number of rows and the dtypes, once for the values.
    """
    names = header(path)
    assigned = assign(wanted, names, str(path))
    dtypes = {column: INT64 for columns in assigned.values() for column in columns}
    length = 0
    for rows in row_blocks(path):
        length += len(rows)
        for column, values in parse(path, names, rows, dtypes).items():
            dtypes[column] = values.dtype
    if length == 0:
        raise UserError(f"{path} holds no rows below its header line", "give data with at least one sample")
    empty = gather(assigned, {column: np.empty(0, dtype) for column, dtype in dtypes.items()})
    fields = {name: Field(values.shape[1:], values.dtype) for name, values in empty.items()}

    def blocks() -> Iterator[Samples]:
        for rows in row_blocks(path):
            samples = gather(assigned, parse(path, names, rows, dtypes))
            yield {name: values.astype(fields[name].dtype, copy=False) for name, values in samples.items()}

    return Source(fields, length, blocks)


def header(path: Path) -> list[str]:
    """The names of the columns."""
    with table(path) as reader:
        names: list[str] = next(reader, [])
    if not names or all(is_number(name) for name in names):
        raise UserError(f"{path} has no header line", "add a first line with the names of the columns")
    return [name.strip() for name in names]


@contextlib.contextmanager
def table(path: Path) -> Iterator[Any]:
    """A csv.reader of the file; raises UserError if it is not one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield csv.reader(file, delimiter=delimiter(path))
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8, such as: iconv -f latin1 -t utf-8"
        raise UserError(f"{path} is not text in UTF-8: {error.reason} {error.object[error.start]:#04x}", fix) from error
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV table: {error}", "write it again, with quotes that close") from error


def row_blocks(path: Path) -> Iterator[Rows]:
    """The lines below the header, many at a time."""
    with table(path) as reader:
        width = len(next(reader))
        rows: Rows = []
        for row in reader:
            if not row:
                continue
            if len(row) != width:
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(row)} values under {width} column names", "correct the line"
                )
            rows.append((reader.line_num, row))
            if len(rows) == BLOCK_ROWS:
                yield rows
                rows = []
    if rows:
        yield rows


def parse(path: Path, names: list[str], rows: Rows, dtypes: Dtypes) -> dict[str, NDArray[Any]]:
    """The wanted columns, in these dtypes, or in float64 if int64 does not do."""
    texts = dict(zip(names, zip(*(row for _, row in rows), strict=True), strict=True))
    columns = {}
    for column, dtype in dtypes.items():
        try:
            columns[column] = numbers(texts[column], dtype)
        except ValueError as error:
            line, text = next(
                (line, text) for (line, _), text in zip(rows, texts[column], strict=True) if not is_number(text)
            )
            raise UserError(
                f"{path}, line {line}: {text!r} in column {column!r} is not a number",
                "fill in or leave out such lines, or choose columns with --field",
            ) from error
    return columns


def numbers(texts: tuple[str, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The texts as numbers; raises ValueError if one is not a number."""
    try:
        return np.array(texts, dtype)
    except (ValueError, OverflowError):
        return np.array(texts, FLOAT64)


def is_number(text: str) -> bool:
    """Whether float() takes it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def delimiter(path: Path) -> str:
    """What stands between values."""
    return "\t" if path.suffix.lower() == ".tsv" else ","

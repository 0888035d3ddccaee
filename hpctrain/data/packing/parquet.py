"""Parquet files as sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Samples, check_field
from hpctrain.data.packing.columns import Columns, assign, gather
from hpctrain.data.packing.source import Source
from hpctrain.errors import MissingExtra, UserError

BLOCK_ROWS = 8192


def from_parquet(path: Path, wanted: Columns | None) -> Source:
    """The columns of a Parquet file: numbers, booleans, and lists (of lists) of them, equally long in all rows."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    try:
        with ParquetFile(path) as file:
            present = file.schema_arrow.names
            length = file.metadata.num_rows
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a Parquet file, or is damaged: {error}", "make it again") from error
    assigned = assign(wanted, present, str(path))
    needed = list(dict.fromkeys(column for columns in assigned.values() for column in columns))
    if length == 0:
        raise UserError(f"{path} holds no rows", "give data with at least one sample")

    def blocks() -> Iterator[Samples]:
        begin = 0
        try:
            with ParquetFile(path) as file:
                for batch in file.iter_batches(BLOCK_ROWS, columns=needed):
                    columns = {
                        column: values(batch.column(column), f"{path}: column {column!r}", begin) for column in needed
                    }
                    yield gather(assigned, columns)
                    begin += batch.num_rows
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is damaged: {error}", "make it again") from error

    first = next(blocks())
    fields = {name: check_field(name, array.shape, array.dtype, str(path)) for name, array in first.items()}
    return Source(fields, length, blocks)


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

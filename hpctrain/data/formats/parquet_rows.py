"""Rows of Parquet files, read by row groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.errors import MissingExtra, UserError


class ParquetRows:
    """Rows of one file. Row groups are decoded whole; those used last are kept, as blocks of HDF5 files are."""

    def __init__(self, path: Path, cache: BlockCache) -> None:
        try:
            import pyarrow
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise MissingExtra("pyarrow", "data") from error
        self.path = path
        self.cache = cache
        try:
            with ParquetFile(path) as file:
                groups = [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)]
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} is not a Parquet file, or is damaged: {error}", "make it again") from error
        self.ends = np.cumsum(groups, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self._row(row) for row in rows]

    def plain(self, record: dict[str, Any]) -> Any:
        for name, value in record.items():
            if value is None or isinstance(value, (str, bytes)):
                raise UserError(
                    f"{self.path}: column {name!r} holds {'no value' if value is None else 'text'}",
                    "encode it: open_dataset(..., decode=function), or name only the fields to use",
                )
        return record

    def _row(self, row: int) -> dict[str, Any]:
        group = int(np.searchsorted(self.ends, row, side="right"))
        begin = int(self.ends[group - 1]) if group else 0
        table = self.cache.get((self.path, group), lambda: self._group(group))
        return {name: plain_value(table.column(name)[row - begin]) for name in table.column_names}

    def _group(self, group: int) -> Any:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self.path) as file:
                return file.read_row_group(group).combine_chunks()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path} is damaged: {error}", "make it again") from error


def plain_value(scalar: Any) -> Any:
    """A value of a table: numbers keep their dtype, lists become arrays or lists."""
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

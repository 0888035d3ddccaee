"""Types and values of Arrow columns: one type for the files of a table, without loss, and columns as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain.errors import UserError
from hpctrain.system.array_types import Array


def unified(schema: Any, found: Sequence[tuple[str, Any]]) -> tuple[Any, dict[str, str]]:
    """The schema with types that hold the values of all files, as Arrow promotes them, and ``Table.clashes``.

    Args:
        schema: the table's schema; the files' other columns are ignored.
        found: each file and its schema.
    """
    import pyarrow

    clashes: dict[str, str] = {}
    for path, each in found:
        if len(set(each.names)) < len(each.names):
            name = next(name for name in each.names if each.names.count(name) > 1)
            raise UserError(f"{path} has two columns named {name!r}", "rename one of them")
        for index, name in enumerate(schema.names):
            known = schema.field(index).type
            kind = each.field(name).type if name in each.names else None
            if kind in (known, None):
                continue
            pair = [pyarrow.schema([(name, one)]) for one in (known, kind)]
            try:
                (wide,) = pyarrow.unify_schemas(pair, promote_options="permissive")
            except pyarrow.ArrowException:
                clashes.setdefault(name, f"{path}: column {name!r} holds {kind}, and {known} in files before it")
            else:
                schema = schema.set(index, schema.field(index).with_type(wide.type))
    return schema, clashes


def require_exact(fragment: Any, name: str, kind: Any, begin: int) -> None:
    """Raise UserError for the first value of a column that a type does not hold exactly."""
    import pyarrow

    for batch in fragment.scanner(columns=[name]).to_batches():
        for row, value in enumerate(batch.column(0)):
            try:
                pyarrow.array([value.as_py()], value.type).cast(kind)
            except pyarrow.ArrowInvalid as error:
                what = f"{fragment.path}: column {name!r} has {value} in row {begin + row}, which {kind} does not hold"
                raise UserError(what, "write all files with one type, or name only other columns") from error
        begin += len(batch)


def values(column: Any, what: str, begin: int, each: int = 1) -> Array:
    """Convert an Arrow array to NumPy; lists become further axes. Raises UserError for nulls or uneven lists.

    ``begin`` is the row of the first value in the table, and each row has ``each`` values.
    """
    from pyarrow import compute, types

    if column.null_count:
        row = begin + column.is_null().index(True).as_py() // each
        raise UserError(f"{what} has no value in row {row}", "fill it in, or choose columns with --field")
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        array: Array = column.to_numpy(zero_copy_only=False)
        return array
    lengths = np.unique(compute.list_value_length(column).to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise UserError(f"{what} has lists of {lengths[0]} to {lengths[-1]} values", "pad them to one length")
    inner = values(column.flatten(), what, begin, each * int(lengths[0]))
    return inner.reshape(len(column), int(lengths[0]), *inner.shape[1:])

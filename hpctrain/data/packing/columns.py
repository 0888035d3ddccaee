"""Which columns of a table make which array, and which arrays of an archive are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Samples
from hpctrain.errors import UserError

Columns = Mapping[str, tuple[str, ...]]
"""The columns of each array. An array of one column has no column axis."""


def assign(wanted: Columns | None, present: Sequence[str], where: str) -> Columns:
    """The columns of each array, by default one array a column; ``*`` stands for all columns not named.

    Raises:
        UserError: a column is not there, or two have the same name.
    """
    if len(set(present)) < len(present):
        raise UserError(f"{where} has two columns of the same name", "rename one of them")
    if wanted is None:
        return {name: (name,) for name in present}
    named = {column for columns in wanted.values() for column in columns}
    missing = sorted(named - set(present) - {"*"})
    if missing:
        raise UserError(f"{where} has no column {missing[0]!r}", f"it has {', '.join(present)}: name some of them")
    rest = tuple(column for column in present if column not in named)
    return {
        name: tuple(column for given in columns for column in (rest if given == "*" else (given,)))
        for name, columns in wanted.items()
    }


def gather(assigned: Columns, columns: Mapping[str, NDArray[Any]]) -> Samples:
    """The arrays, from columns of one table block."""
    return {
        name: columns[members[0]] if len(members) == 1 else np.stack([columns[member] for member in members], axis=1)
        for name, members in assigned.items()
    }


def only_names(wanted: Columns | None, kind: str) -> tuple[str, ...] | None:
    """The arrays to take from a file that holds arrays, not columns; None for all."""
    if wanted and any(columns != (name,) for name, columns in wanted.items()):
        raise UserError(
            f"columns are put together for {kind}, which holds arrays", "write --field NAME to take an array"
        )
    return tuple(wanted) if wanted else None


def parse_fields(texts: Sequence[str]) -> Columns | None:
    """From ``name=column,column``, or ``name`` for the column or array of that name, as on the command line."""
    wanted = {}
    for text in texts:
        name, _, columns = text.partition("=")
        if not name or text.endswith("="):
            raise UserError(f"--field {text} names no columns", "write --field x=age,height --field y=label, or x=*")
        wanted[name] = tuple((columns or name).split(","))
    return wanted or None

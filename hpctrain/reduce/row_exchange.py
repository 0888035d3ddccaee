"""Sums of sparse gradients over the ranks: only the rows of each table that ranks looked up are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from hpctrain.comm.group import Group
from hpctrain.reduce.mpi_allreduce import LARGEST_MESSAGE, duplicate
from hpctrain.system.array_types import Array, Ints

INDEX_BYTES = 8
WHAT = "add up sparse gradients"
"""Completes "waited for the other ranks to ..." in errors."""


@dataclass(frozen=True)
class SparseRows:
    """Some rows of a table; all others are zero."""

    indices: Ints
    """(n,): row numbers, each once."""
    values: Array
    """(n, columns)."""


class RowExchange:
    """Adds up rows over the ranks of a group. Every rank makes the same calls in the same order.

    Each rank sends its rows to all others as (index, value), and they are added in rank order; if that would take more
    bytes than summing whole tables, whole tables are summed. All ranks know all counts, so they decide the same.

    Args:
        group: the ranks.
        tables: (rows, columns) of each table.
        dtype: dtype of the values.
        largest: largest message in elements; a single table may exceed it.
    """

    def __init__(
        self,
        group: Group,
        tables: Sequence[tuple[int, int]],
        dtype: DTypeLike = np.float32,
        largest: int = LARGEST_MESSAGE,
    ) -> None:
        self.group = Group("rows", duplicate(group))
        self.tables = tables
        self.dtype = np.dtype(dtype)
        self.index_items = INDEX_BYTES // self.dtype.itemsize
        self.largest = largest

    def sum(self, given: Sequence[SparseRows]) -> list[SparseRows]:
        """Returns the sums by table; includes all rows that any rank passed, even if their sum is zero.

        Args:
            given: this rank's rows of each table.

        Raises:
            RunFailed: a rank does not arrive in time.
        """
        counts = self.group.gather(np.array([len(rows.indices) for rows in given], np.int64), WHAT)
        travels = [
            rows_are_fewer(int(total), *table, self.dtype.itemsize)
            for total, table in zip(counts.sum(0), self.tables, strict=True)
        ]
        sums: dict[int, SparseRows] = {}
        for index, as_rows in enumerate(travels):
            if not as_rows:
                sums[index] = self._sum_whole(given[index], *self.tables[index])
        among = [index for index, as_rows in enumerate(travels) if as_rows]
        items = {index: int(counts[:, index].sum()) * (self.index_items + self.tables[index][1]) for index in among}
        for together in in_messages(items, self.largest):
            gathered = self._gather([given[index] for index in together], counts[:, together])
            sums |= {index: added(parts) for index, parts in zip(together, gathered, strict=True)}
        return [sums[index] for index in range(len(self.tables))]

    def _gather(self, given: Sequence[SparseRows], counts: Ints) -> list[list[SparseRows]]:
        """Gathers all ranks' rows, by table and rank; ``counts`` is by rank and table."""
        widths = [rows.values.shape[1] for rows in given]
        index_items = self.index_items
        indices = [np.ascontiguousarray(rows.indices).view(self.dtype) for rows in given]
        mine = np.concatenate([*indices, *[rows.values.reshape(-1) for rows in given]])  # one message is one wait
        lengths = counts @ np.array([index_items + width for width in widths])
        everything = self.group.join(mine, lengths.tolist(), WHAT)
        found: list[list[SparseRows]] = [[] for _ in given]
        at = 0
        for rank_counts in counts.tolist():
            begin = at + index_items * sum(rank_counts)
            for table, (count, width) in enumerate(zip(rank_counts, widths, strict=True)):
                own = everything[at : at + index_items * count].copy().view(np.int64)  # a copy is aligned
                found[table].append(SparseRows(own, everything[begin : begin + count * width].reshape(count, width)))
                at, begin = at + index_items * count, begin + count * width
            at = begin
        return found

    def _sum_whole(self, given: SparseRows, rows: int, columns: int) -> SparseRows:
        table = np.zeros((rows, columns), self.dtype)
        missing = np.ones(rows, np.uint8)
        table[given.indices], missing[given.indices] = given.values, 0
        everywhere = self.group.begin_min(missing, WHAT)
        self.group.add(table, WHAT)
        indices = np.flatnonzero(everywhere() == 0)
        return SparseRows(indices, table if len(indices) == rows else table[indices])

    def close(self) -> None:
        """Releases the communicator."""
        self.group.free()


def in_messages(items: Mapping[int, int], largest: int) -> list[list[int]]:
    """Groups tables, in order, into as few messages as possible: each message is one wait.

    Args:
        items: elements to send of each table.
        largest: largest message in elements; a larger table gets a separate message.
    """
    messages: list[list[int]] = []
    filled = 0
    for table, count in items.items():
        if not messages or filled + count > largest:
            messages.append([])
            filled = 0
        messages[-1].append(table)
        filled += count
    return messages


def rows_are_fewer(total: int, rows: int, columns: int, item_bytes: int) -> bool:
    """Whether sending ``total`` rows of all ranks to each rank takes fewer bytes than summing whole tables.

    In a ring allreduce (Patarasuk and Yuan 2009) each rank sends and receives nearly two tables, plus a byte per row to
    mark which rows are there.
    """
    as_rows = total * (INDEX_BYTES + columns * item_bytes)
    return as_rows < 2 * rows * columns * item_bytes + rows and as_rows < LARGEST_MESSAGE * item_bytes


def added(parts: Sequence[SparseRows]) -> SparseRows:
    """The sum of rows, in the order of the parts."""
    some = [part for part in parts if len(part.indices)]
    if len(some) <= 1:
        return some[0] if some else parts[0]
    indices, places = np.unique(np.concatenate([part.indices for part in some]), return_inverse=True)
    values = np.zeros((len(indices), some[0].values.shape[1]), some[0].values.dtype)
    begin = 0
    for part in some:
        end = begin + len(part.indices)
        values[places[begin:end]] += part.values  # no duplicates within a part
        begin = end
    return SparseRows(indices, values)

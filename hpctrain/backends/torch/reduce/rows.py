"""Sums of sparse gradients by a process group: the rows stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hpctrain.backends.torch.process_groups import ProcessGroup
from hpctrain.reduce.row_exchange import WHAT, rows_are_fewer

TensorRows: TypeAlias = tuple[Tensor, Tensor]
"""Row numbers, each once: int64[n]; and values [n, columns]. All other rows are zero."""


@dataclass(eq=False)
class GroupRows:
    """The same sums as by RowExchange, in the same order. Every rank makes the same calls in the same order."""

    peers: ProcessGroup
    """Process group of the ranks."""
    tables: Sequence[tuple[int, int]]
    """(rows, columns) of each table."""
    dtype: torch.dtype
    """Dtype of the sums."""

    def __post_init__(self) -> None:
        self.close = self.peers.close

    def sum(self, given: Sequence[TensorRows]) -> list[TensorRows]:
        """The sums by table; includes all rows that any rank passed. Raises RunFailed if a rank does not arrive."""
        everyones = self.peers.group.gather(np.array([len(indices) for indices, _ in given], np.int64), WHAT)
        sums = []
        for rows, (length, columns), counts in zip(given, self.tables, everyones.T.tolist(), strict=True):
            if rows_are_fewer(sum(counts), length, columns, self.dtype.itemsize):
                sums.append(self._of_rows(rows, counts))
            else:
                sums.append(self._of_table(rows, length, columns))
        return sums

    def _of_rows(self, rows: TensorRows, counts: list[int]) -> TensorRows:
        indices, values = rows
        there = self._gathered(indices, counts)
        parts = self._gathered(values.to(self.dtype), counts)
        unique, places = torch.unique(torch.cat(there), return_inverse=True)
        total = values.new_zeros((len(unique), values.shape[1]), dtype=self.dtype)
        for place, part in zip(places.split(counts), parts, strict=True):
            total.index_add_(0, place, part)  # no duplicates within a part, so the order is that of the ranks
        return unique, total

    def _of_table(self, rows: TensorRows, length: int, columns: int) -> TensorRows:
        indices, values = rows
        table = values.new_zeros((length, columns), dtype=self.dtype)
        used = values.new_zeros(length, dtype=torch.int32)
        table[indices], used[indices] = values.to(self.dtype), 1
        for wait in (self.peers.sum(used, WHAT), self.peers.sum(table, WHAT)):
            wait()
        found = used.nonzero()[:, 0]
        return found, table[found]

    def _gathered(self, own: Tensor, counts: list[int]) -> list[Tensor]:
        """The rows of each rank; messages have equal lengths."""
        padded = own.new_zeros((max(counts), *own.shape[1:]))
        padded[: len(own)] = own
        everything = self.peers.gather(padded, WHAT)
        return [part[:count] for part, count in zip(everything, counts, strict=True)]

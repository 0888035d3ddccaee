"""Copies the next batch to the device while the current one is computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from hpctrain.system.array_types import Array

Tensors = dict[str, torch.Tensor]


class Placed(dict[str, Array]):
    """A batch in page-locked memory, of which a copy to the device may be under way."""

    under_way: BatchCopy | None = None
    is_used = False
    """Whether the step has asked for it."""

    def begin(self, copy: BatchCopy) -> None:
        """A copy is under way."""
        self.under_way = copy

    def take(self) -> BatchCopy | None:
        """The copy that is under way, if any; it may be taken once."""
        copy, self.under_way, self.is_used = self.under_way, None, True
        return copy


@dataclass(frozen=True)
class BatchCopy:
    """A batch on its way to the device."""

    tensors: Tensors
    done: Any
    """Event at the end of the copy."""


class CopiesAhead:
    """Keeps one copy under way, of the batch that will be used next; more would take the device's memory.

    Batches are added by the threads that load them and used by the thread that trains, in the same order.

    Args:
        begin: begins the copy of a batch.
    """

    def __init__(self, begin: Callable[[Mapping[str, Array]], BatchCopy]) -> None:
        self.begin = begin
        self.lock = threading.Lock()
        self.waiting: deque[ref[Placed]] = deque()
        """Weakly, since batches of an epoch that is not continued are never used."""
        self.latest: ref[Placed] | None = None
        """The last batch whose copy was begun."""

    def add(self, batch: Placed) -> Placed:
        """Adds a batch that will be used after those added before."""
        with self.lock:
            self.waiting.append(ref(batch))
            self._begin_next()
        return batch

    def take(self, batch: Placed) -> BatchCopy | None:
        """The copy of a batch, if there is one and it has not been taken; begins the next one."""
        with self.lock:
            copy = batch.take()
            self._begin_next()
        return copy

    def _begin_next(self) -> None:
        last = self.latest() if self.latest is not None else None
        while self.waiting and (last is None or last.under_way is None):
            batch = self.waiting.popleft()()
            if batch is not None and not batch.is_used:
                batch.begin(self.begin(batch))
                self.latest, last = ref(batch), batch

"""Blocks of arrays that are slow to read, kept while there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

MAPPED_BYTES = 2**20
"""What a mapped block counts in memory: it takes a descriptor, of which there are not many."""


class Sized(Protocol):
    """An array, or a table."""

    @property
    def nbytes(self) -> int:
        """Of memory that it takes."""


Block = TypeVar("Block", bound=Sized)


class BlockCache:
    """The blocks used last, up to ``limit_bytes`` of them together; safe with several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.blocks: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], Block]) -> Block:
        """The block of this key, read if it is not here."""
        with self.lock:
            kept: Block | None = self.blocks.get(key)
            if kept is not None:
                self.blocks.move_to_end(key)
                return kept
        block = read()
        with self.lock:
            if key not in self.blocks:
                self.blocks[key] = block
                self.num_bytes += block.nbytes
            while self.num_bytes > self.limit_bytes:
                self.num_bytes -= self.blocks.popitem(last=False)[1].nbytes
        return block

"""An LRU cache in memory, for blocks that are slow to read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar


class Sized(Protocol):
    """An object of known size, such as an array or a table."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""


Block = TypeVar("Block", bound=Sized)


class BlockCache:
    """The most recently used blocks, up to ``limit_bytes`` in total, or a single larger one; thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.blocks: OrderedDict[Hashable, Any] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], Block]) -> Block:
        """The block of this key; calls ``read`` if it is not cached."""
        with self.lock:
            kept: Block | None = self.blocks.get(key)
            if kept is not None:
                self.blocks.move_to_end(key)
                return kept
            self._shrink(0)  # a large one goes before the next is read
        block = read()
        with self.lock:
            if key not in self.blocks:
                self.blocks[key] = block
                self.num_bytes += block.nbytes
            self._shrink(1)
        return block

    def _shrink(self, least: int) -> None:
        while self.num_bytes > self.limit_bytes and len(self.blocks) > least:
            self.num_bytes -= self.blocks.popitem(last=False)[1].nbytes

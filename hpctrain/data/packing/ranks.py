"""Processes that pack together."""

from __future__ import annotations

from typing import Any, Protocol

PATIENCE_S = 7 * 86400.0
"""Longest wait for the other ranks: one that dies ends the others through MPI."""


class Ranks(Protocol):
    """Such as a ``Group`` of hpctrain.comm."""

    rank: int
    size: int

    def allgather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """The values of all ranks, in rank order; ``what`` they do completes an error."""


class Alone:
    """A process by itself."""

    rank = 0
    size = 1

    def allgather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """See Ranks."""
        return [value]


ALONE = Alone()

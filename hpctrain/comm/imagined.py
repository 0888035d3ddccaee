"""Ranks of a run that one process imagines, to build what one of them would have without the others."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.world import World

Members = tuple[str, tuple[int, ...]]
"""A group's name, and its members by their rank in the world."""


class Call(NamedTuple):
    """A collective that a rank has called in a group."""

    what: str
    array: str
    """Dtype and shape of its array; empty for other values."""


@dataclass
class Calls:
    """The collectives of a rank, with the values that it gave."""

    made: dict[Members, list[tuple[Call, Any]]] = field(default_factory=dict)
    """By group, in order."""
    first: Calls | None = None
    """Those of the rank that was imagined first."""

    def of(self, members: Members) -> list[Call]:
        """Those of one group, without values."""
        return [call for call, _ in self.made.get(members, ())]

    def add(self, members: Members, call: Call, value: Any) -> Any:
        """Adds a call; returns the value that the first rank gave at this place, or this rank's if it has none."""
        own = self.made.setdefault(members, [])
        own.append((call, value))
        theirs = self.first.made.get(members, []) if self.first else []
        if len(own) > len(theirs):
            return value
        their_call, their_value = theirs[len(own) - 1]
        return their_value if their_call == call else value


class Imagined(Group):
    """A group without communication: acts as if all other ranks gave the values of the rank that was imagined first,
    or of this process.

    Args:
        name: name of the group.
        ranks: its members, by their rank in the world.
        rank: index of this process among them.
        calls: the collectives of this rank.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int = 0, calls: Calls | None = None) -> None:
        super().__init__(name)
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(ranks)
        self.calls = Calls() if calls is None else calls

    def allgather(self, value: Any, what: str = "", timeout_s: float = TIMEOUT_S) -> list[Any]:
        everyone = [self._call(what, value)] * self.size
        everyone[self.rank] = value
        return everyone

    def broadcast(self, value: Any, what: str = "", root: int = 0, timeout_s: float = TIMEOUT_S) -> Any:
        found = self._call(what, value)
        return value if self.rank == root else found

    def gather(self, values: NDArray[Any], what: str = "", timeout_s: float = TIMEOUT_S) -> NDArray[Any]:
        self._call(what, None, values)
        return np.stack([values] * self.size)

    def add(self, values: NDArray[Any], what: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._call(what, None, values)
        values *= self.size

    def split_by(self, name: str, part_of: Callable[[int], int]) -> Group:
        own = part_of(self.rank)
        members = [rank for rank in range(self.size) if part_of(rank) == own]
        return Imagined(name, [self.ranks[rank] for rank in members], members.index(self.rank), self.calls)

    def _call(self, what: str, value: Any, array: NDArray[Any] | None = None) -> Any:
        described = "" if array is None else f"{array.dtype}{list(array.shape)}"
        return self.calls.add((self.name, self.ranks), Call(what, described), value)


@dataclass(frozen=True)
class ImaginedWorld(World):
    """A world of imagined ranks; made by ``imagine``."""

    ranks_per_node: int = 1

    def nodes_of(self, group: Group, what: str = "") -> list[int]:
        """See World."""
        assert isinstance(group, Imagined), "it has been split from the world"
        return [rank // self.ranks_per_node for rank in group.ranks]


def imagine(rank: int, size: int, ranks_per_node: int, first: Calls | None = None) -> ImaginedWorld:
    """The world as one of its ranks sees it, without tensor groups and stages. Nodes have consecutive ranks.

    ``first`` are the collectives of a rank that was imagined before.
    """
    everyone = Imagined("world", range(size), rank, Calls(first=first))
    node, nodes = rank // ranks_per_node, -(-size // ranks_per_node)
    data = Imagined("data", everyone.ranks, rank, everyone.calls)
    local = everyone.split_by("local", lambda one: one // ranks_per_node)
    return ImaginedWorld(everyone, data, local, node, nodes, socket.gethostname(), ranks_per_node=ranks_per_node)

"""Ranks of a group as threads of one process, to test communication without launching ranks."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import TIMEOUT_S, Group

Result = TypeVar("Result")
PATIENCE_S = 120.0


class ThreadGroup(Group):
    """A group whose ranks are threads that add and gather arrays, and gather small values."""

    def __init__(self, rank: int, table: list[Any], meeting: threading.Barrier) -> None:
        super().__init__("threads")
        self.rank, self.size = rank, len(table)
        self.table, self.meeting = table, meeting

    def gather(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> NDArray[Any]:
        self.table[self.rank] = np.array(values)
        self.meeting.wait(PATIENCE_S)
        everything = np.stack(self.table)
        self.meeting.wait(PATIENCE_S)
        return everything

    def allgather(self, value: Any, what: str = "", timeout_s: float = TIMEOUT_S) -> list[Any]:
        self.table[self.rank] = json.dumps(value)
        self.meeting.wait(PATIENCE_S)
        everything = [json.loads(each) for each in self.table]
        self.meeting.wait(PATIENCE_S)
        return everything

    def broadcast(self, value: Any, what: str = "", root: int = 0, timeout_s: float = TIMEOUT_S) -> Any:
        return self.allgather(value if self.rank == root else None)[root]

    def broadcast_array(
        self, values: NDArray[Any], what: str = "", root: int = 0, timeout_s: float = TIMEOUT_S
    ) -> None:
        values[...] = self.gather(values, what)[root]

    def barrier(self, what: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.meeting.wait(PATIENCE_S)

    def begin_min(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> Callable[[], NDArray[Any]]:
        begun = np.array(values)
        return lambda: self.gather(begun, what).min(0)

    def split(self, name: str, part: int) -> Group:
        parts = self.allgather(part)
        assert len({*parts}) in (1, self.size), "all together, or each alone"
        return self if len({*parts}) == 1 else Group(name)

    def add(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        values[...] = self.gather(values, what, timeout_s).sum(0)

    def begin_add(self, values: NDArray[Any], what: str = "", timeout_s: float = TIMEOUT_S) -> Callable[[bool], bool]:
        """Begin a sum that is only done when waited for, because other ranks may be late."""
        left = [values]

        def is_done(wait: bool) -> bool:
            if wait and left:
                self.add(left.pop(), what, timeout_s)
            return not left

        return is_done


class Messages(ThreadGroup):
    """A group of threads that also send each other arrays, through queues."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group.rank, group.table, group.meeting)
        self.table[self.rank] = {}
        self.meeting.wait(PATIENCE_S)
        self.queues: list[dict[tuple[int, Any], queue.Queue[Any]]] = list(self.table)
        """Queues of each receiving rank, by sender and tag."""
        self.meeting.wait(PATIENCE_S)

    def to(self, rank: int, tag: Any) -> queue.Queue[Any]:
        """Queue of arrays from this rank to another."""
        return self.queues[rank].setdefault((self.rank, tag), queue.Queue())

    def coming(self, rank: int, tag: Any) -> queue.Queue[Any]:
        """Queue of arrays from another rank to this one."""
        return self.queues[self.rank].setdefault((rank, tag), queue.Queue())

    def post(self, values: NDArray[Any], rank: int, tag: int) -> Callable[[], bool]:
        self.to(rank, tag).put(np.array(values))
        return lambda: True

    def fetch(self, values: NDArray[Any], rank: int, tag: int, what: str, timeout_s: float = TIMEOUT_S) -> None:
        values[...] = self.coming(rank, tag).get(timeout=PATIENCE_S)


def in_threads(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Run ``work`` on ``size`` ranks, and return their results; if one raises, all end."""
    table: list[Any] = [None] * size
    meeting = threading.Barrier(size)

    def guarded(rank: int) -> Result:
        try:
            return work(ThreadGroup(rank, table, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))

"""Retries of failed reads, by the same and by other ranks, before a run gives up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.system import foreign_text

T = TypeVar("T")

PAUSES_S: tuple[float, ...] = (0.1, 0.5, 2.0, 5.0, 10.0, 15.0, 30.0)
"""Pauses before each retry; in total, about as long as the failover of a file server takes."""
FINAL = (DamagedCheckpoint, UserError)
"""Errors that are not retried, by precedence."""


def read_among(group: Group, count: int, read: Callable[[int], T], what: str) -> tuple[dict[int, T], list[int]]:
    """Read items 0 to ``count`` - 1, each on one rank; if that fails, retry on another rank. Collective.

    Args:
        group: ranks that split the work.
        count: number of items, equal on all ranks.
        read: returns an item by its index; raises DamagedCheckpoint, UserError or UnreadableCheckpoint.
        what: what the ranks are doing, for messages.

    Returns:
        The items that this rank has read, by index, and for each item the rank that has it.

    Raises:
        DamagedCheckpoint: an item is damaged (on all ranks).
        UserError: an item may not be read by this user, or cannot be by this version (on all ranks).
        UnreadableCheckpoint: all tries to read an item failed (on all ranks).
    """
    held: dict[int, T] = {}
    holders = [index % group.size for index in range(count)]
    pending = list(range(count))
    reason = ""
    for pause_s in (None, *PAUSES_S):
        if pause_s is not None:
            time.sleep(pause_s)
        problems: list[tuple[int, str, str, str]] = []
        for index in pending:
            try:
                if holders[index] == group.rank:
                    held[index] = read(index)
            except (*FINAL, UnreadableCheckpoint) as error:
                problems.append((index, type(error).__name__, error.what, error.fix))
        failures = [problem for of_rank in group.allgather(problems, what) for problem in of_rank]
        for kind in FINAL:
            for _, name, problem, fix in failures:
                if name == kind.__name__:
                    raise kind(problem, fix)
        if not failures:
            return held, holders
        if not reason and group.rank == 0:
            with suppress(OSError):
                text = f"{failures[0][2]}; trying again for up to {sum(PAUSES_S):.0f} s"
                foreign_text.show(f"hpctrain: {text}", sys.stderr)
        reason, fix = failures[0][2:]
        pending = [index for index, *_ in failures]
        for index in pending:  # half the group away, to be on another node if there are several
            holders[index] = (holders[index] + max(1, group.size // 2)) % group.size
    who = " by this process" if group.size == 1 else " by different ranks"
    raise UnreadableCheckpoint(f"{reason} (tried {len(PAUSES_S) + 1} times{who} in {sum(PAUSES_S):.0f} s)", fix)


def retry_read(read: Callable[[], T]) -> T:
    """Call ``read`` in one process, with the retries and errors of ``read_among``."""
    return read_among(Group("alone"), 1, lambda _: read(), "read")[0][0]

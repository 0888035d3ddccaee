"""Whether any rank of a program's own process group gave true; on the CPU, so that no GPU is waited for."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from hpctrain.backends.torch.process_groups import ends_calmly

LAST_S = 5.0
"""Longest wait at exit for the last exchange. A rank that has failed does not wait longer for the others."""


def start_any() -> Callable[[bool], Callable[[], bool]]:
    """Returns a function that starts an exchange of flags over gloo, and returns what reads the result. Collective."""
    group = dist.new_group(backend="gloo")
    last: list[dist.Work] = []
    ends_calmly()
    atexit.register(finish, last)  # runs before what ``ends_calmly`` has registered

    def start(mine: bool) -> Callable[[], bool]:
        flag = torch.tensor([mine], dtype=torch.int32)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group, async_op=True)
        last[:] = [work]

        def read() -> bool:
            work.wait()
            return bool(flag.item())

        return read

    return start


def finish(left: Iterable[dist.Work]) -> None:
    """Waits for exchanges that are under way: one that ended during interpreter shutdown would abort the process."""
    for work in left:
        with suppress(RuntimeError):  # the other rank has failed, or takes longer
            work.wait(timedelta(seconds=LAST_S))

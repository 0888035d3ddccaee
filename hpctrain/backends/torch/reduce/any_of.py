"""Whether any rank of a program's own process group gave true; on the CPU, so that no GPU is waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def start_any() -> Callable[[bool], Callable[[], bool]]:
    """Returns a function that starts an exchange of flags over gloo, and returns what reads the result. Collective."""
    group = dist.new_group(backend="gloo")

    def start(mine: bool) -> Callable[[], bool]:
        flag = torch.tensor([mine], dtype=torch.int32)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group, async_op=True)

        def read() -> bool:
            work.wait()
            return bool(flag.item())

        return read

    return start

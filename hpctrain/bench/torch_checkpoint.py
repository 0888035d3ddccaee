"""PyTorch's own ways to save, for comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray

Take = Callable[[str, Callable[[], object]], None]


def contenders(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, Callable[[Path, str, Take], float | None]]:
    """By name; each saves to a path and gives the seconds for which training would have stopped, if that is less."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def torch_save(path: Path, name: str, take: Take) -> None:
        def work() -> None:
            with open(path, "wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        take(name, work)

    def dcp_async(path: Path, name: str, take: Take) -> float:
        stall = 0.0

        def work() -> None:
            nonlocal stall
            begin = time.perf_counter()
            future: Any = dcp.async_save(dict(tensors), checkpoint_id=str(path))
            stall = time.perf_counter() - begin
            future.result()  # its writer syncs each file

        take(name, work)
        return stall

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {"write: torch.save + fsync": torch_save, "write: DCP async + fsync": dcp_async}

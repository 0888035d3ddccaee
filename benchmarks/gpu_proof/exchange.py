"""Exchanges between the ranks' devices: NCCL on a GPU, gloo on a CPU."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu_proof.machine import device_of, finish
from benchmarks.gpu_proof.rows import Figures, Setting, require
from hpctrain import connect
from hpctrain.backends.torch.strategies.exchange import over_torch
from hpctrain.train.clock import NO_CLOCK, Waiting

LARGE = 2**22
"""Elements of a timed sum: 16 MiB."""


def row(setting: Setting) -> Figures:
    """Checks exchanges whose results are known, and times a sum."""
    world, device = connect(), device_of(setting.on_gpu)
    rank, size = world.rank, world.size
    require(size == setting.row.ranks, f"{size} ranks see each other, not {setting.row.ranks}")
    opened = over_torch(world.everyone, device, Waiting(NO_CLOCK), 60.0)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        own = torch.arange(1000, device=device).remainder(7).to(dtype) + rank
        wanted = torch.arange(1000).remainder(7) * size + size * (size - 1) // 2
        total = opened.sum(own, dtype, "sum").cpu()
        require(torch.equal(total.to(torch.int64), wanted), f"a sum in {dtype} is wrong")
    for other, part in enumerate(opened.gather(torch.full((3, 5), rank, device=device), "gather")):
        require(bool((part == other).all()), f"what rank {other} gave to a gather is wrong")
    into = torch.empty(100, device=device)
    previous, following = (rank - 1) % size, (rank + 1) % size
    for first in (rank % 2 == 0, rank % 2 == 1):  # one queue per rank: even ranks send first, odd ones receive first
        if first:
            opened.post(torch.full((100,), float(rank), device=device), following, 0)
        else:
            opened.expect(into, previous, 0)("a message")
    opened.settle("messages")
    require(bool((into == previous).all()), f"rank {rank} got a wrong message")
    large, seconds = torch.ones(LARGE, device=device), []
    for _ in range(5):
        finish(setting.on_gpu)
        began = time.perf_counter()
        opened.sum(large, torch.float32, "time a sum")
        finish(setting.on_gpu)
        seconds.append(time.perf_counter() - began)
    opened.close()
    return {"by": "NCCL" if setting.on_gpu else "gloo", "sum_of_16_MiB_ms": 1000 * sorted(seconds)[2]}

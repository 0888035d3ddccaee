"""Which device a rank computes on."""

from __future__ import annotations

import torch

from hpctrain.comm.world import World
from hpctrain.errors import UserError


def pick_device(local_rank: int) -> torch.device:
    """One GPU a rank, in turn, made the current one of this thread; the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def require_same_kind(device: torch.device, world: World) -> None:
    """Raises UserError, on every rank, if some ranks have a GPU and others none. Collective."""
    everywhere = world.everyone.allgather([device.type, world.host], "compare devices")
    if len({kind for kind, _ in everywhere}) > 1:
        blind = next(rank for rank, (kind, _) in enumerate(everywhere) if kind == "cpu")
        raise UserError(
            f"rank {blind} on {everywhere[blind][1]} sees no GPU, though other ranks do",
            "run hpctrain doctor there (driver, CUDA_VISIBLE_DEVICES, a PyTorch for CPUs), or leave the host out",
        )

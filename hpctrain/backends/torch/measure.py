"""Measures the links and devices of a job: ``python -m hpctrain.backends.torch.measure`` on every rank.

Rank 0 prints the result, for ``comm.speeds`` to judge. Gradients take the same way: a process group over MPI's ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from hpctrain.system import foreign_text

try:
    import torch
except ModuleNotFoundError:  # in a job for Keras
    foreign_text.show("PyTorch, which measures them, is not installed", sys.stderr)
    sys.exit()

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.performance import peak_per_s
from hpctrain.backends.torch.process_groups import have_own_gpus, peers_of, use_shared_network
from hpctrain.comm.group import Group
from hpctrain.comm.speeds import MARK, Speeds, bus_gb_per_s, network_of, rounds
from hpctrain.comm.world import World, connect
from hpctrain.system.fabric import fabric

NUM_BYTES = 64 * 10**6
TIMES, WARM_UP = 5, 2
"""Allreduces whose fastest counts, and those before them."""
CHOSEN = ("NCCL_NET", "NCCL_IB_DISABLE")
"""Variables by which the user has chosen NCCL's network."""


def measure(world: World) -> Speeds:
    """Measures all nodes at once, then pairs of neighbouring nodes. Collective; the result is complete on rank 0.

    Ranks that share a GPU are measured over host memory, as they exchange gradients.
    """
    device = accelerator.pick(world.local_rank)
    compute = device
    if device.type != "cpu" and not have_own_gpus(world.everyone, device):
        device = torch.device("cpu")
    use_shared_network(world, device)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "nccl")
        os.environ.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)})
        within = allreduce_gb_per_s(world.local, device)
        between = list[tuple[int, int, float]]()
        for pairs in rounds(world.nodes):
            mine = next((index for index, pair in enumerate(pairs) if world.node in pair), -1)
            group = world.everyone.split("two nodes", mine if mine >= 0 else len(pairs) + world.node)
            gb = allreduce_gb_per_s(group, device) if mine >= 0 else None
            between += [(*pairs[mine], gb)] if gb is not None else []
            group.free()
        network = network_of(log.read_text(errors="replace")) if log.exists() else ""
    dtype = torch.float32 if compute.type == "cpu" else torch.float16
    network_chosen = any(name in os.environ for name in CHOSEN)
    own = Own(
        world.host, world.node, world.local_rank, within, between, peak_per_s(compute, dtype) / 1e12,
        network, "" if network_chosen else fabric(),
    )  # fmt: skip
    ranks = [Own(*found) for found in world.everyone.allgather(list(own), "compare links and devices")]
    hosts = {rank.node: rank.host for rank in ranks}
    links = {(one, other): gb for rank in ranks for one, other, gb in rank.between}
    return Speeds(
        device=compute.type,
        within={rank.host: rank.within for rank in ranks if rank.within is not None},
        between=[(hosts[one], hosts[other], gb) for (one, other), gb in sorted(links.items())],
        devices=[(rank.host, rank.local_rank, rank.tflops) for rank in ranks],
        network=next((rank.network for rank in ranks if rank.network), ""),
        fabrics={rank.host: rank.fabric for rank in ranks if rank.fabric},
    )


class Own(NamedTuple):
    """What one rank has measured; see Speeds."""

    host: str
    node: int
    local_rank: int
    within: float | None
    between: Sequence[tuple[int, int, float]]
    tflops: float
    network: str
    fabric: str


def allreduce_gb_per_s(group: Group, device: torch.device) -> float | None:
    """Bus bandwidth of an allreduce over the ranks of a group; None for one rank. Collective."""
    if group.size == 1:
        return None
    values = torch.zeros(NUM_BYTES // 4, device=device)
    with closing(peers_of(group, device)) as peers:

        def once() -> None:
            peers.sum(values, "measure their links")()
            accelerator.synchronize(device)

        seconds = min(timed(once) for _ in range(WARM_UP + TIMES))
    slowest = max(group.allgather(seconds, "measure their links"))
    return bus_gb_per_s(NUM_BYTES, group.size, slowest)


def timed(call: Callable[[], None]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Measures, and prints one line on rank 0."""
    world = connect()
    speeds = measure(world)
    if world.rank == 0:
        os.write(sys.stdout.fileno(), f"{MARK}{json.dumps(asdict(speeds))}\n".encode())


if __name__ == "__main__":
    main()

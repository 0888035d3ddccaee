"""``python -m hpctrain.doctor.link`` on MPI ranks: what the connection between rank 0 and another rank gives."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from typing import Any

import numpy as np

MARK = "hpctrain-link:"
LATENCY_BYTES = 8
BANDWIDTH_BYTES = 4 * 2**20


def main() -> None:
    """Measures between rank 0 and the last rank, which is on another node if there is one, and prints one JSON line."""
    from mpi4py import MPI

    from hpctrain.comm.world import connect

    world = connect()
    comm = MPI.COMM_WORLD
    peer = world.size - 1
    facts: dict[str, Any] = {
        "ranks": world.size,
        "nodes": world.nodes,
        "hosts": sorted(set(world.everyone.allgather(socket.gethostname(), "name the hosts"))),
        "cores": world.everyone.allgather(len(os.sched_getaffinity(0)), "count the cores"),
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    }
    if world.size > 1:
        facts["latency_us"] = 1e6 * ping_pong(comm, world.rank, peer, LATENCY_BYTES, rounds=1000)
        facts["bandwidth_gb_s"] = BANDWIDTH_BYTES / ping_pong(comm, world.rank, peer, BANDWIDTH_BYTES, rounds=30) / 1e9
        facts["allreduce_4mb_ms"] = 1e3 * allreduce(comm, BANDWIDTH_BYTES, rounds=20)
    if world.rank == 0:
        print(MARK + json.dumps(facts), flush=True)


def ping_pong(comm: Any, rank: int, peer: int, size: int, rounds: int) -> float:
    """Median seconds of one way, after a warm-up; the other ranks wait."""
    buffer = np.zeros(size, dtype=np.uint8)
    times = []
    comm.Barrier()
    for _ in range(rounds + rounds // 5):
        begin = time.perf_counter()
        if rank == 0:
            comm.Send(buffer, peer)
            comm.Recv(buffer, peer)
        elif rank == peer:
            comm.Recv(buffer, 0)
            comm.Send(buffer, 0)
        times.append((time.perf_counter() - begin) / 2)
    comm.Barrier()
    return statistics.median(times[rounds // 5 :])


def allreduce(comm: Any, size: int, rounds: int) -> float:
    """Median seconds of a float32 sum over all ranks."""
    values, total = np.ones(size // 4, dtype=np.float32), np.empty(size // 4, dtype=np.float32)
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        comm.Allreduce(values, total)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()

"""Program of ``hpctrain bench scaling`` on the ranks: measures exchanges by size, without any framework.

Sums are formed as in runs on CPUs: through shared memory within a node; between nodes both by MPI's Allreduce and by
our ring.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.world import World, connect
from hpctrain.reduce.mpi_allreduce import FlatAllreduce, HostAllreduce
from hpctrain.reduce.ring_allreduce import RingAllreduce
from hpctrain.reduce.shm_allreduce import open_shm_allreduce
from hpctrain.system.files import write_atomically
from hpctrain.system.quantities import positive

BYTES = tuple(2**power for power in (12, 16, 18, 20, 22, 24, 26))
"""Default buffer sizes: 4 KiB to 64 MiB."""
SECONDS_EACH = 0.5
"""Time in seconds for the exchanges of one size and round, which determines their number."""
LEAST, MOST = 3, 50
"""Fewest and most timed exchanges per size and round."""
ROUNDS = 3


def measure(world: World, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measures median seconds on the slowest rank; a row for each size, round and method. Collective."""
    place = {"nodes": world.nodes, "ranks": world.size}
    return [
        {**place, "ring": ring, "bytes": size, "seconds": _median_of(world, size, ring)}
        for _ in range(rounds)
        for size in sizes
        for ring in ((False, True) if world.nodes > 1 else (False,))
    ]


def _median_of(world: World, size: int, ring: bool) -> float:
    elements = max(1, size // 4)
    sums: HostAllreduce = open_shm_allreduce(world.data, elements, ring=ring) or (
        RingAllreduce if ring else FlatAllreduce
    )(world.data, elements)
    warm = max(_timed(world, sums) for _ in range(2))
    slowest = max(world.data.allgather(warm, "time one exchange"))
    count = int(np.clip(SECONDS_EACH / slowest, LEAST, MOST))
    mine = [_timed(world, sums) for _ in range(count)]
    sums.close()
    everywhere = np.array(world.data.allgather(mine, "collect the times"))
    return float(np.median(everywhere.max(axis=0)))


def _timed(world: World, sums: HostAllreduce) -> float:
    assert world.data.comm is not None, "one rank exchanges nothing"
    sums.start(0, len(sums.buffer))
    world.data.comm.Barrier()
    begin = time.perf_counter()
    sums.finish()
    return time.perf_counter() - begin


def main() -> None:
    """Measures; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", required=True)
    parser.add_argument("--bytes", default=",".join(map(str, BYTES)))
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    args = parser.parse_args()
    world = connect()
    rows = measure(world, [int(size) for size in args.bytes.split(",")], args.rounds)
    if world.rank == 0:
        write_atomically(Path(args.out), json.dumps({"rows": rows}).encode())


if __name__ == "__main__":
    main()

"""A program that knows nothing of hpctrain but its heartbeat, for ``hpctrain run -- python``: a loop with a fault.

python -m benchmarks.failures.plain_program FAULT RANK STEP [--exchange none|gloo|mpi] [--heartbeat] [--steps 12]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from benchmarks.failures.faults import Injection

STEP_S = 0.1


def by_gloo() -> tuple[Callable[[], None], Callable[[], None]]:
    """An exchange by PyTorch's gloo, and its end."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    values = torch.ones(1000)

    def exchange() -> None:
        torch.distributed.all_reduce(values)

    return exchange, torch.distributed.destroy_process_group


def by_mpi() -> tuple[Callable[[], None], Callable[[], None]]:
    """An exchange by mpi4py, which ends by itself."""
    from mpi4py import MPI

    def exchange() -> None:
        MPI.COMM_WORLD.allreduce(1)

    return exchange, lambda: None


def main() -> None:
    """Trains, in a manner of speaking."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault")
    parser.add_argument("rank", type=int)
    parser.add_argument("step", type=int)
    parser.add_argument("--exchange", choices=["none", "gloo", "mpi"], default="none")
    parser.add_argument("--heartbeat", action="store_true", help="tell hpctrain of each step")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    number = int(os.environ.get("RANK", "0"))
    begin = {"none": lambda: (lambda: None, lambda: None), "gloo": by_gloo, "mpi": by_mpi}[args.exchange]
    exchange, end = begin()
    fault = "" if args.fault == "none" else args.fault
    injection = Injection(fault, number == args.rank, args.step)
    for step in range(args.steps):
        time.sleep(STEP_S)
        injection.due()
        exchange()
        if args.heartbeat:
            import hpctrain

            hpctrain.heartbeat()
        print(f"step {step + 1} loss {1 / (step + 1):.4f}", flush=True)
    end()


if __name__ == "__main__":
    main()

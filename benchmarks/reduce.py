"""Times the exchange of gradients by itself: ``python -m benchmarks.reduce``."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.program import start
from hpctrain.bench.ranks import on_ranks
from hpctrain.errors import ExitCode, UserError
from hpctrain.system import foreign_text

WAYS = "mpi-node,mpi-flat,mpi-flat-fp16,horovod-flat,horovod-flat-fp16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="0.0625,1,4,16,64", help="comma-separated MiB of fp32 gradients")
    parser.add_argument("--ways", default=WAYS, help=f"comma-separated ways (default: {WAYS})")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="timed exchanges of a turn (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.ranks < 2:
        raise UserError("one rank exchanges nothing", "give --ranks 2 or more")
    options = {"--sizes": args.sizes, "--ways": args.ways, "--rounds": str(args.rounds), "--steps": str(args.steps)}
    found = on_ranks("benchmarks.reduce_ranks", options, args.ranks)
    if args.json:
        foreign_text.show(json.dumps({"rows": found}))
        return ExitCode.DONE
    foreign_text.show(f"{'way':<20}{'MiB':>9}{'median ms':>12}{'GB/s':>8}")
    for row in found:
        foreign_text.show(f"{row['way']:<20}{row['mib']:>9.4g}{row['median_ms']:>12.3f}{row['gb_per_s']:>8.2f}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(start("reduce", "the exchange of gradients alone, by size and way", add_arguments, run))

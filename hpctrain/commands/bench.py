"""``hpctrain bench``: measurements on this machine, each a module with ``add_arguments(parser)`` and ``run(args)``."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from hpctrain.errors import UserError

BENCHMARKS = {
    "step": "one training step with each way of exchanging gradients, compared with no exchange",
    "data": "samples per second, and whether prefetch hides the reading",
    "checkpoint": "stall, write and read of a checkpoint compared with copies in memory and raw writes",
    "scaling": "a run at several sizes: efficiency, where time goes, how many nodes are worth it",
}
MOVED = ("parallel", "reduce", "simulate", "straggler")
"""Benchmarks of earlier versions that only developers need: they are in ``benchmarks/`` of a checkout."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand for each benchmark."""
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, text in BENCHMARKS.items():
        module = benchmark(name)
        module.add_arguments(commands.add_parser(name, help=text, description=text))
    for name in MOVED:
        commands.add_parser(name, add_help=False, prefix_chars="\0").add_argument("words", nargs="*")


def benchmark(name: str) -> ModuleType:
    """The module behind a benchmark."""
    return importlib.import_module(f"hpctrain.bench.{name}")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark; returns an exit code."""
    if args.benchmark in MOVED:
        fix = f"in a checkout of hpctrain, run python -m benchmarks.{args.benchmark}"
        raise UserError(f"hpctrain bench {args.benchmark} is no longer part of the package", fix)
    return int(benchmark(args.benchmark).run(args))

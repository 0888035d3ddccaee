"""``hpctrain bench``: measurements on this machine, each a module with ``add_arguments(parser)`` and ``run(args)``."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

BENCHMARKS = {
    "step": "one training step with each way of exchanging gradients, compared with no exchange",
    "data": "samples per second, and whether prefetch hides the reading",
    "checkpoint": "stall, write and read of a checkpoint compared with copies in memory and raw writes",
    "scaling": "a run at several sizes: efficiency, where time goes, how many nodes are worth it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand for each benchmark."""
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, text in BENCHMARKS.items():
        module = benchmark(name)
        module.add_arguments(commands.add_parser(name, help=text, description=text))


def benchmark(name: str) -> ModuleType:
    """The module behind a benchmark."""
    return importlib.import_module(f"hpctrain.bench.{name}")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark; returns an exit code."""
    return int(benchmark(args.benchmark).run(args))

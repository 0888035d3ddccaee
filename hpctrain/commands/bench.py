"""``hpctrain bench``: measurements on this machine, each a module with ``add_arguments(parser)`` and ``run(args)``."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

BENCHMARKS = {
    "step": "one training step: our reducers beside no exchange, DDP, plain Horovod and MultiWorkerMirroredStrategy",
    "reduce": "the exchange of gradients alone, by size and reducer",
    "data": "samples per second, and whether prefetch hides the reading",
    "checkpoint": "stall, write and read of a checkpoint beside raw writes, torch.save and DCP",
    "parallel": "plans that share out a model beside one process, DTensor, torch's pipelining, ZeRO and FSDP2",
    "scaling": "a run at several sizes: efficiency, where time goes, how many nodes are worth it",
    "simulate": "what very many ranks cost the processes that deal with all of them, and how that grows",
    "straggler": "recall, precision and latency of the monitor on replayed slow-downs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each benchmark."""
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, text in BENCHMARKS.items():
        module = benchmark(name)
        module.add_arguments(commands.add_parser(name, help=text, description=text))


def benchmark(name: str) -> ModuleType:
    """The module behind a benchmark."""
    room = f"{name}.{name}_command" if name in ("scaling", "straggler") else name
    return importlib.import_module(f"hpctrain.bench.{room}")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen one; an exit code."""
    return int(benchmark(args.benchmark).run(args))

"""Program of ``benchmarks.step`` for all ranks: hpctrain's contenders, other settings of it, and other libraries."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpctrain.bench.ranks import Contender
from hpctrain.bench.step import Contenders, Ours, our_contenders, time_contenders
from hpctrain.comm.world import World
from hpctrain.config.sections import ParallelConfig, ReduceConfig

SETTINGS = {
    "sharded": (ReduceConfig(), ParallelConfig(shard="optimizer")),
    "tables": (ReduceConfig(kind="mpi"), ParallelConfig(shard="tables")),
    "densify": (ReduceConfig(kind="mpi", sparse="densify"), ParallelConfig()),
}
"""What some contenders set in a run file."""


def all_contenders(args: argparse.Namespace, world: World) -> Contenders:
    """Those of ``hpctrain bench step`` and more. Collective."""
    ours = our_contenders(args, world)
    names = args.contenders.split(",")
    if args.framework == "torch":
        from benchmarks import torch_step

        more = {name: configured(name, world, torch_step.problem) for name in SETTINGS}
        return replace(ours, problem=torch_step.problem, others={**more, **torch_step.others(names, world)})
    from benchmarks import keras_step

    more = {name: configured(name, world, keras_step.problem) for name in SETTINGS}
    return replace(ours, problem=keras_step.problem, others={**more, **keras_step.others(names, world)})


def configured(name: str, world: World, problem: Callable[..., Any]) -> Callable[[str], Contender]:
    """A contender that is hpctrain with settings of a run file."""
    return lambda model: Ours(problem(model, world, name == "densify"), world, *SETTINGS[name], None)


if __name__ == "__main__":
    time_contenders(all_contenders)

"""Program of ``benchmarks.step`` on the ranks: hpctrain's contenders, further settings of it, and other libraries."""

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
    "densify": (ReduceConfig(kind="mpi", sparse="densify"), ParallelConfig()),
}
"""Run file settings of some contenders."""


def all_contenders(args: argparse.Namespace, world: World) -> Contenders:
    """Contenders of ``hpctrain bench step`` and further ones. Collective."""
    ours = our_contenders(args, world)
    names = args.contenders.split(",")
    if args.framework == "torch":
        from benchmarks import torch_step

        more = {name: configured(name, world, torch_step.problem) for name in SETTINGS}
        return replace(ours, problem=torch_step.problem, others={**more, **torch_step.others(names, world)})
    from benchmarks import keras_step

    more = {"densify": configured("densify", world, keras_step.problem)}
    return replace(ours, problem=keras_step.problem, others={**more, **keras_step.others(names, world)})


def configured(name: str, world: World, problem: Callable[..., Any]) -> Callable[[str], Contender]:
    """Makes a contender: hpctrain with settings from SETTINGS."""
    return lambda model: Ours(problem(model, world, name == "densify"), world, *SETTINGS[name], None)


if __name__ == "__main__":
    time_contenders(all_contenders)

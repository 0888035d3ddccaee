"""Program of ``benchmarks.apart`` on the ranks."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpctrain.backends.local_training import NOTHING, LocalFramework, inner_world
from hpctrain.backends.torch.torch_bench_models import problem
from hpctrain.comm.world import World, alone, connect
from hpctrain.config.sections import Config, ReduceConfig, SyncConfig, TrainConfig
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.train.framework import Framework, StepSettings, samples_of
from hpctrain.train.state import TrainState

ROUND = 32
WARMUP, STEPS = 2, 8
"""Steps when there is an exchange in each step."""


class Run:
    """A model trained by a contender.

    Args:
        contender: local, or a variant of reducer mpi.
        model: name of a model of the step benchmark.
        world: the ranks.
        pause_s: seconds that this rank sleeps in each forward pass.
    """

    def __init__(self, contender: str, model: str, world: World, pause_s: float) -> None:
        self.problem = problem(model, world)
        self.problem.model.register_forward_pre_hook(lambda *_: time.sleep(pause_s))
        self.samples = samples_of(self.problem.batch)
        self.progress = TrainState()
        self.apart = contender == "local"
        sync = SyncConfig(kind="local", every_steps=ROUND)
        inner = inner_world(world, sync) if self.apart else world
        train = TrainConfig(steps=1, global_batch=self.samples * world.size)
        config = Config(name="bench", task="bench:step", train=train)
        choice = ReducerChoice(ReduceConfig(), inner, None if self.apart else f"mpi-{contender}")
        framework = self.problem.open(inner, StepSettings(train, used=config.features()), choice)
        self.framework: Framework = framework
        if self.apart:
            local = LocalFramework(framework, world, inner, sync, replace(choice, config=ReduceConfig(kind="mpi")))
            local.follow(self.progress, 10**9)
            self.framework = local

    def steps(self, number: int, samples: int) -> int:
        """Makes steps; returns the number of this rank's samples that were trained on."""
        made = 0
        for _ in range(number):
            self.framework.set_learning_rate(1.0)
            result: Any = self.framework.step([self.problem.batch], samples)
            made += self.samples if result is not NOTHING else 0
            self.progress.step += 1
        return made


def samples_per_s(contender: str, model: str, world: World, pause_s: float) -> float:
    """Samples per second of all ranks, until the slowest is done."""
    run = Run(contender, model, world, pause_s)
    samples = run.samples * world.size
    run.steps(ROUND if run.apart else WARMUP, samples)
    world.everyone.barrier("begin together")
    begin = time.perf_counter()
    made = run.steps(ROUND if run.apart else STEPS, samples)
    everywhere = world.everyone.allgather([made, time.perf_counter() - begin], "collect the times")
    run.framework.close()
    return float(sum(made for made, _ in everywhere) / max(seconds for _, seconds in everywhere))


def update_s(model: str, world: World) -> float:
    """Median seconds of an update without any exchange."""
    run, seconds = Run("flat", model, alone(), 0.0), []
    for _ in range(WARMUP + STEPS):
        begin = time.perf_counter()
        run.steps(1, run.samples)
        seconds.append(time.perf_counter() - begin)
    world.everyone.barrier("wait for the others")
    return statistics.median(seconds[WARMUP:])


def main() -> None:
    """Measures; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--contenders", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--slow", action="store_true", help="the last rank takes twice as long for an update")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    world = connect()
    pause_s = update_s(args.model, world) if args.slow else 0.0
    pause_s *= world.rank == world.size - 1
    found: dict[str, list[float]] = {name: [] for name in args.contenders.split(",")}
    for _ in range(args.turns):
        for name, rates in found.items():
            rates.append(samples_per_s(name, args.model, world, pause_s))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    first = next(iter(medians.values()))
    rows = [{"contender": name, "samples_per_s": rate, "ratio": rate / first} for name, rate in medians.items()]
    if world.rank == 0:
        Path(args.out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

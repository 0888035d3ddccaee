"""Program of ``benchmarks.convergence`` on the ranks: trains a small GPT with each method on the same samples."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from contextlib import closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.convergence import METHODS, Row
from hpctrain.backends.local_training import LocalFramework
from hpctrain.bench.ranks import write_rows
from hpctrain.comm.world import World, alone, connect
from hpctrain.config.sections import Config, ReduceConfig, SyncConfig, TrainConfig
from hpctrain.data.order import part_of
from hpctrain.rank.wiring import make_framework
from hpctrain.tasks.torch_chartext import task
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Framework, HostBatch
from hpctrain.train.state import TrainState

EVALUATED = 128
"""Number of validation samples, the same at each evaluation."""
POINTS = 20
"""Evaluations per curve."""
NEVER = 10**9


def train(world: World, method: str, args: argparse.Namespace, seed: int) -> Row:
    """Makes one run. Collective."""
    after = round(args.warm_up * args.steps)
    settings = METHODS[method]
    sync = {key: after if value == "warm_up" else value for key, value in settings.get("sync", {}).items()}
    reduce = {key: after if value == "warm_up" else value for key, value in settings.get("reduce", {}).items()}
    isolated = settings.get("isolated", False)
    mine = alone() if isolated else world
    torch.manual_seed(seed)
    problem = task(width=args.width, lr=args.lr)
    config = Config(
        name="bench",
        task="bench:convergence",
        seed=seed,
        train=TrainConfig(steps=args.steps, global_batch=args.batch * world.size),
        reduce=ReduceConfig(**{"kind": "none" if mine.size == 1 else "mpi", **reduce}),
        sync=SyncConfig(**sync),
    )
    seconds, curve, state = 0.0, [], TrainState()
    random = np.random.default_rng(seed)
    train_data: dict[str, NDArray[Any]] = problem.train
    held_out = {name: array[:EVALUATED] for name, array in problem.validation.items()}
    with closing(make_framework(config, mine, problem, IntervalClock())) as framework:
        judged: Framework = framework
        if isinstance(framework, LocalFramework):
            apart = sync["every_steps"] >= NEVER
            framework.follow(state, NEVER if apart else args.steps)
            judged = framework.framework if apart else framework
        for step in range(args.steps):
            chosen = random.integers(0, len(train_data["token"]), args.batch * world.size)
            chosen = chosen[part_of(len(chosen), world.rank, world.size)]
            batch: HostBatch = {name: array[chosen] for name, array in train_data.items()}
            begin = time.perf_counter()
            framework.set_learning_rate(factor(step, args.steps, args.decay))
            framework.step([batch], args.batch * mine.size)
            seconds += time.perf_counter() - begin
            state.step += 1
            if (step + 1) % max(1, args.steps // POINTS) == 0 or step + 1 == args.steps:
                total, weight = judged.evaluate(held_out)["loss"]
                loss = float(world.data.sum(np.array([total / weight]))[0] / world.size)
                values = framework.facts.gradient_bytes // 4
                sent = bytes_sent(values, world.size, step + 1, min(step + 1, after), settings)
                curve.append((step + 1, loss, sent, seconds))
    return Row(method, seed, world.size, curve[-1][1], curve[-1][2], seconds, curve)


def factor(step: int, steps: int, decay: str) -> float:
    """Learning-rate factor: a short warm-up, then half a cosine or constant."""
    left = 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2 if decay == "cosine" else 1.0
    return min(1.0, (step + 1) / 20) * left


def bytes_sent(values: int, ranks: int, steps: int, after: int, settings: dict[str, Any]) -> float:
    """Bytes that a rank sends in a whole run with ring exchanges of ``values`` values."""
    exchange = 2 * (ranks - 1) / ranks * 4 * values
    exact = after if "warm_up" in {*settings.get("reduce", {}).values(), *settings.get("sync", {}).values()} else 0
    share: float = settings.get("share", 1.0)
    return exchange * (exact + (steps - exact) * share)


def main() -> None:
    """Makes the runs ``method:seed`` one after another; rank 0 writes the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", required=True)
    for name in ("--steps", "--batch", "--width"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--warm-up", "--lr"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--decay", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = connect()
    runs = [run.rpartition(":") for run in args.runs.split(",")]
    rows = [train(world, name, args, int(seed)) for name, _, seed in runs]
    if world.rank == 0:
        write_rows(args.out, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()

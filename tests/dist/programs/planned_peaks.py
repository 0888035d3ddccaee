"""Memory of the ranks under each plan that fits their number, as planned and as measured.

Rank 0 prints JSON: per task and plan, the planned bytes and the largest measured peak. planned_peaks.py [TASK...]
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import Any

from torch import Tensor

from hpctrain.backends.torch.reduce.sharded import HostSharded
from hpctrain.backends.torch.strategies.memory_estimate import ParallelLayout, footprints
from hpctrain.backends.torch.task.shares import ONLY
from hpctrain.comm.world import World, connect, in_grid
from hpctrain.commands.plan import largest_micro_batch
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.rank.batches import first_batch
from hpctrain.rank.problem import make_problem
from hpctrain.rank.trial import estimate
from hpctrain.rank.wiring import make_framework
from hpctrain.train.clock import IntervalClock
from tests.support.live_tensors import Live
from tests.tasks import weighed_tasks

ACCUMULATE = "train.accumulate"
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "whole": {},
        "optimizer": {"shard": "optimizer"},
        "gradients": {"shard": "gradients"},
        "parameters": {"shard": "parameters"},
        "offload": {"shard": "parameters", "offload": True},
        "gradients in 4": {"shard": "gradients", ACCUMULATE: 4},
        "parameters in 4": {"shard": "parameters", ACCUMULATE: 4},
        "tensor": {"tensor": 2},
        "sequence": {"tensor": 2, "sequence": True},
        "pipeline": {"pipeline": 2},
        "interleaved": {"pipeline": 2, "pipeline_chunks": 3},
    },
    4: {
        "tensor 2 x optimizer": {"tensor": 2, "shard": "optimizer"},
        "tensor 2 x parameters": {"tensor": 2, "shard": "parameters"},
        "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
        "tensor": {"tensor": 4},
        "pipeline": {"pipeline": 4},
        "parameters": {"shard": "parameters"},
        "pipeline 2 x parameters": {"pipeline": 2, "shard": "parameters"},
        "pipeline 2 x gradients": {"pipeline": 2, "shard": "gradients"},
    },
}


def config_of(task: str, parallel: dict[str, Any]) -> Config:
    """The run file."""
    keys = dict(parallel)
    accumulate = keys.pop(ACCUMULATE, 4 if "pipeline" in parallel else 1)
    train = TrainConfig(steps=1, global_batch=weighed_tasks.SAMPLES, accumulate=accumulate)
    return Config(
        name="peaks",
        task=f"tests.tasks.weighed_tasks:{task}",
        train=train,
        parallel=ParallelConfig(**keys),
        reduce=ReduceConfig(kind="mpi"),
    )


def planned(config: Config, ranks: int) -> int:
    """Bytes of a rank without the program and the copy for a checkpoint."""
    given = config.parallel
    whole, _ = estimate(config, given.tensor, ranks, [given.pipeline] if given.pipeline > 1 else [])
    each = given.tensor * given.pipeline
    micro = {size: largest_micro_batch(config, ranks // size) for size in (given.tensor, each)}
    chunks = given.pipeline_chunks
    found = footprints({given.tensor: whole}, ranks, micro, 0, config.train.accumulate, chunks)
    layout = ParallelLayout(given.tensor, ranks // each, given.shard, given.pipeline, chunks)
    (one,) = [one for one in found if one.plan == layout]
    return one.total - one.staging


def measured(config: Config, world: World) -> int:
    """Largest memory of tensors in an update after the first."""
    world = in_grid(world, config.parallel.tensor, config.parallel.pipeline)
    problem = make_problem(config, world)
    framework: Any
    with closing(make_framework(config, world, problem.task, IntervalClock())) as framework:
        batches = [first_batch(problem, world)] * config.train.accumulate
        framework.step(batches, weighed_tasks.SAMPLES)
        known = [one.value for one in framework.state()]
        exchange = getattr(framework.parts.reducers.used.of[ONLY], "sums", None)
        foreign = exchange.leaving if isinstance(exchange, HostSharded) else []
        with Live([one for one in known if isinstance(one, Tensor)], foreign) as live:
            framework.step(batches, weighed_tasks.SAMPLES)
        return live.peak


def main(tasks: list[str]) -> dict[str, Any]:
    """Results by task and plan."""
    world, found = connect(), {}
    for task in tasks:
        for name, parallel in PLANS[world.size].items():
            config = config_of(task, parallel)
            plan = planned(config, world.size) if world.rank == 0 else 0
            peaks = world.everyone.allgather(measured(config, world), "compare the peaks")
            found[f"{task}: {name}"] = {"planned": plan, "peaks": peaks}
    return found if world.rank == 0 else {}


if __name__ == "__main__":
    everything = main(sys.argv[1:] or ["gpt", "mlp"])
    if everything:
        print(json.dumps(everything))

"""Training attempts on ranks that end early and are resumed under another plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpctrain.checkpoint.hook import checkpoint_hook
from hpctrain.checkpoint.resume_compat import identity_of
from hpctrain.comm.group import Group
from hpctrain.comm.world import World, in_grid
from hpctrain.config.sections import CheckpointConfig, Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.rank import wiring
from hpctrain.rank.problem import make_problem
from hpctrain.run.folder import RunDir
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Framework
from hpctrain.train.hooks import BaseHook, StopReason
from hpctrain.train.state import Placement
from hpctrain.train.stateful import value_of

SETTINGS = {"global_batch": 25, "accumulate": 2, "clip_norm": 0.05, "ema_decay": 0.9}


def furthest(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """Largest difference, relative to the reference value or to 1, whichever is larger."""
    pairs = zip(ones, others, strict=True)
    return max(float(np.max(np.abs(one - other) / np.maximum(1, np.abs(other)), initial=0)) for one, other in pairs)


class Recorder(BaseHook):
    """Records the sample ids of each step, and stops after a given step."""

    def __init__(self, framework: Framework, group: Group, last: int) -> None:
        self.group, self.last = group, last
        self.ids: list[list[int]] = []
        self.step = framework.step
        framework.step = self.recording  # type: ignore[method-assign]

    def recording(self, micro_batches: Any, global_samples: int) -> Any:
        """Record the sample ids, then run the step itself."""
        mine = [int(number) for batch in micro_batches for number in batch["id"]]
        told = self.group.allgather(mine, "name the samples")
        self.ids.append([number for rank in told for number in rank])
        return self.step(micro_batches, global_samples)

    def after_step(self, trainer: Any, result: Any) -> StopReason | None:
        return StopReason.REQUESTED if trainer.state.step >= self.last else None


def attempt(
    world: World,
    folder: Path,
    parallel: ParallelConfig,
    task: str,
    steps: int,
    last: int | None = None,
    kind: Literal["mpi", "nccl"] = "mpi",
    **train: Any,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Train, resuming from the folder's checkpoints; return the sample ids of each step, and the whole state.

    Args:
        world: the ranks, which all make the same call.
        folder: the run folder.
        parallel: the plan.
        task: the task of the run; its samples have an ``id``.
        steps: number of steps of the whole run.
        last: step after which this attempt stops; by default the last one.
        kind: ``reduce.kind`` of several ranks.
        train: further keys of the ``train`` section.
    """
    world = in_grid(world, parallel.tensor, parallel.pipeline)
    config = Config(
        name="run",
        task=task,
        train=TrainConfig(**{"steps": steps, **SETTINGS, **train}),
        reduce=ReduceConfig(
            kind=kind if world.data.size > 1 or kind == "nccl" else "auto",
            verify_every_steps=None if parallel.shard in ("parameters", "gradients") else 1,
        ),
        parallel=parallel,
        checkpoint=CheckpointConfig(interval="none"),
    )
    run_dir, clock = RunDir(folder), IntervalClock()
    if world.rank == 0:
        run_dir.create()
    world.everyone.barrier("make the folder")
    problem = make_problem(config, world)
    framework = wiring.make_framework(config, world, problem.task, clock)
    identity = identity_of(asdict(config), problem.order.global_batch, problem.fingerprint())
    hook = checkpoint_hook(config.checkpoint, identity, world, run_dir, lambda event: None)
    recorder = Recorder(framework, world.data, last or steps)
    trainer = wiring.make_trainer(config, world, problem, framework, clock, [hook, recorder])
    with closing(framework), closing(hook), closing(trainer.data):
        trainer.fit()
        return recorder.ids, whole_state(framework, world.everyone)


def whole_state(framework: Framework, group: Group) -> dict[str, Any]:
    """Gather parameters, averages and optimizer state from all ranks and assemble each tensor."""
    mine = [each for each in framework.state() if each.placement in (Placement.REPLICATED, Placement.CUT)]
    pieces = [(each.name, each.cut and [each.cut.shape, each.cut.begin], value_of(each).tolist()) for each in mine]
    found: dict[str, Any] = {}
    for name, cut_, value in (piece for rank in group.allgather(pieces, "gather the state") for piece in rank):
        array = np.array(value)
        if cut_ is None:
            found[name] = array
            continue
        whole = found.setdefault(name, np.full(cut_[0], np.nan))
        whole[tuple(slice(begin, begin + size) for begin, size in zip(cut_[1], array.shape, strict=True))] = array
    return found

"""Cost of snapshots in node memory, or of copies of checkpoints in a store: steps with and without them, alternately.

    mpirun -n 2 python -m benchmarks.snapshots [--copies 1] [--params 10000000] [--every 50] [--step-ms 20] [--pairs 20]
    mpirun -n 2 python -m benchmarks.snapshots --store file:///somewhere

Each rank acts as a node with its own folder in /dev/shm. A step multiplies matrices on one thread, so that CPU time
taken by writers on its core counts; set OMP_NUM_THREADS=1. A turn is ``--every`` steps and one snapshot.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpctrain.checkpoint.hook import CheckpointHook
from hpctrain.checkpoint.policy import Retention, policy_of
from hpctrain.checkpoint.remote import open_remote
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.tiers import open_tiers
from hpctrain.comm.group import Group
from hpctrain.comm.step_vote import Ballot
from hpctrain.comm.world import World, connect
from hpctrain.config.sections import CheckpointConfig, StoreTierConfig, TierConfig, TiersConfig
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import CheckpointSaved, Event, SnapshotSaved
from hpctrain.run.folder import RunDir
from hpctrain.system.shared_memory import FOLDER
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Facts
from hpctrain.train.state import ArrayTensor, TrainState
from hpctrain.train.tree import Leaves

IDENTITY = {"config": {"seed": 0, "train": {}}, "global_batch": 1, "data": ""}
TENSORS = 60
"""Number of tensors of parameters, and of each of Adam's moments."""


class Numbers:
    """Parameters and Adam's moments in fp32, with a framework's interface."""

    facts = Facts("numpy", Leaves(), 0)

    def __init__(self, params: int) -> None:
        values = np.ones((3, TENSORS, params // TENSORS), np.float32)
        kinds = zip(("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"), values, strict=True)
        self.tensors = [ArrayTensor(f"{kind}/{index}", row) for kind, rows in kinds for index, row in enumerate(rows)]
        self.host = self

    def state(self) -> list[ArrayTensor]:
        """All tensors."""
        return self.tensors

    def staging(self, num_bytes: int, given: Any = None) -> Any:
        """Allocates memory and touches it."""
        return np.ones(num_bytes, np.uint8) if given is None else given

    def synchronize(self) -> None:
        """Does nothing: copies are synchronous."""


def hook(world: World, folder: Path, config: CheckpointConfig, events: list[Event], training: Any) -> CheckpointHook:
    """Makes the checkpoint hook of a started run."""
    run = RunDir(Path(world.everyone.broadcast(str(folder))))
    run.create()
    attempts = Attempts(run)
    number = world.everyone.broadcast(attempts.begin() if world.rank == 0 else None)
    fence = partial(attempts.check_fence, number)
    kept = Retention(1)
    store = CheckpointStore(run.checkpoints, kept, world.everyone, fence, world.data)
    tiers = open_tiers(config, world, attempts, number, fence)
    remote = open_remote(config.tiers.store, run.checkpoints, world.everyone, kept, fence)
    policy = policy_of(config, ())
    made = CheckpointHook(store, policy, config, IDENTITY, events.append, tiers=tiers, remote=remote)
    made.before_fit(training)
    return made


def main() -> None:
    """Measures and prints the costs as fractions of the step time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--every", type=int, default=50, help="steps from one snapshot to the next")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--pairs", type=int, default=20, help="turns with snapshots, and without")
    parser.add_argument("--store", help="URL; measure checkpoints with and without copies there, not snapshots")
    args = parser.parse_args()
    found = connect()
    world = dataclasses.replace(found, local=Group("local"), node=found.rank, nodes=found.size)
    matrix = np.ones((512, 512), np.float32)
    begin = time.perf_counter()
    for _ in range(50):
        matrix @ matrix
    count = max(1, round(args.step_ms / 1e3 / ((time.perf_counter() - begin) / 50)))
    count = world.everyone.broadcast(count)
    training: Any = SimpleNamespace(
        world=world, framework=Numbers(args.params), state=TrainState(), clock=IntervalClock()
    )
    events: Mapping[str, list[Event]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as runs, tempfile.TemporaryDirectory(dir=FOLDER) as memory:
        if args.store:
            stores = (TiersConfig(), TiersConfig(store=StoreTierConfig(args.store)))
            configs = [CheckpointConfig(every_steps=args.every, tiers=tiers) for tiers in stores]
        else:
            tier = TierConfig(args.every, memory, args.copies)
            configs = [CheckpointConfig(tiers=tiers) for tiers in (TiersConfig(), TiersConfig(memory=tier))]
        hooks = {
            name: hook(world, Path(runs, name), config, events[name], training)
            for name, config in zip(events, configs, strict=True)
        }
        ballots = {name: Ballot(world.everyone) for name in hooks}
        times: Mapping[str, list[float]] = {name: [] for name in hooks}
        processor: Mapping[str, list[float]] = {name: [] for name in hooks}
        for turn in range(args.pairs + 1):
            for name, each in hooks.items():
                training.ballot = ballots[name]
                world.everyone.meet("begin a turn")
                begin, begin_cpu = time.perf_counter(), time.process_time()
                for _ in range(args.every):
                    for _ in range(count):
                        matrix @ matrix
                    training.state.step += 1
                    each.after_hooks(training)
                    training.ballot.begin()
                if turn:  # the first one makes the staging memory
                    times[name].append(time.perf_counter() - begin)
                    processor[name].append(time.process_time() - begin_cpu)
        for each in hooks.values():
            each.close()
    whole, cores = (
        statistics.median(after / before - 1 for before, after in zip(each["without"], each["with"], strict=True))
        for each in (times, processor)
    )
    kind = CheckpointSaved if args.store else SnapshotSaved
    stalls = {
        name: [event.stall_s or 0.0 for event in all_events if isinstance(event, kind)][1:]
        for name, all_events in events.items()
    }
    if world.rank == 0:
        turn_s = statistics.median(times["without"])
        print(f"{world.size} ranks, {args.params:,} parameters, copies: {args.copies}, {len(stalls['with'])} saved")
        print(f"step without: {turn_s / args.every * 1e3:.2f} ms")
        for name, seconds in stalls.items():
            if seconds:
                median_s = statistics.median(seconds)
                print(f"stall {name}: {median_s * 1e3:.1f} ms, {median_s / turn_s:.2%} of the time")
        print(f"whole cost: {whole:.2%}; processor time, writers included: {cores:.2%} more")


if __name__ == "__main__":
    main()

"""Ranks that train, save and resume: checkpoint_training.py <run folder> <records folder> <JSON options>

Options: task, task_args, steps, every_steps, stop_after, kill_after, kill_rank, precision, save, fresh, batch,
whole_step. Each rank appends a record per step to <records>/<rank>.jsonl, and finally checksums of all its state.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import zlib
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.checkpoint.hook import CheckpointHook, checkpoint_hook
from hpctrain.checkpoint.object_state import state_of
from hpctrain.checkpoint.resume_compat import identity_of
from hpctrain.comm.world import connect
from hpctrain.config.sections import CheckpointConfig, Config, ReduceConfig, ScheduleConfig, TrainConfig
from hpctrain.errors import HpctrainError
from hpctrain.rank import wiring
from hpctrain.rank.problem import make_problem
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import Framework
from hpctrain.train.hooks import BaseHook, StopReason
from hpctrain.train.stateful import Kept, kept_state


class Recorder(BaseHook):
    """Records each step, and stops or kills the rank at the given step."""

    def __init__(self, path: Path, rank: int, options: dict[str, Any], saving: CheckpointHook) -> None:
        self.path = path
        self.saving = saving
        self.rank = rank
        self.options = options
        self.ids: list[int] = []

    def watch(self, framework: Framework) -> None:
        """Record the indices of the samples in each step."""
        step = framework.step

        def recording_step(micro_batches: Any, global_samples: int) -> Any:
            self.ids = [int(number) for batch in micro_batches for number in batch["id"]]
            return step(micro_batches, global_samples)

        framework.step = recording_step  # type: ignore[method-assign]

    def write(self, **fields: Any) -> None:
        """Append one line, which survives even if the rank is killed next."""
        with open(self.path, "a") as file:
            file.write(json.dumps(fields) + "\n")

    def after_step(self, trainer: Any, result: Any) -> StopReason | None:
        step = trainer.state.step
        self.write(step=step, ids=self.ids, loss=result.sums()["loss"])
        if "kill_after" in self.options and self.saving.saver is not None:
            self.saving.saver.rest()  # checkpoints finish before the run ends, however fast its steps are
        if step == self.options.get("kill_after") and self.rank == self.options.get("kill_rank", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        stop_after = self.options.get("stop_after")
        return StopReason.REQUESTED if stop_after is not None and step >= stop_after else None


def checksums(framework: Framework, objects: list[Kept]) -> dict[str, int]:
    """Checksums of every tensor of the state, including this rank's own."""
    sums = {}
    for tensor in (*framework.state(), *state_of(objects, framework.facts.leaves).tensors):
        value = np.empty(tensor.shape, ITEM_TYPES[tensor.dtype])
        tensor.copy_into(value)
        sums[tensor.name] = zlib.crc32(value.tobytes())
    return sums


def main(folder: Path, records: Path, options: dict[str, Any]) -> None:
    """Run one attempt."""
    world = connect()
    config = Config(
        name="run",
        task=options["task"],
        task_args=options.get("task_args", {}),
        train=TrainConfig(
            steps=options["steps"],
            global_batch=options.get("batch", 24),
            ema_decay=0.9,
            precision=options.get("precision", "fp32"),
            eval_every_epochs=1,
            **({"accumulate": 2, "clip_norm": 1.0} if options.get("whole_step", True) else {}),
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=3),
        reduce=ReduceConfig(kind="mpi" if world.size > 1 else "none"),
        checkpoint=CheckpointConfig(every_steps=options.get("every_steps", 3), keep_last=2, **options.get("save", {})),
    )
    run_dir = RunDir(folder)
    run_dir.create()
    records.mkdir(exist_ok=True)
    (records / f"{world.rank}.pid").write_text(str(os.getpid()))
    clock = IntervalClock()
    problem = make_problem(config, world)
    framework = wiring.make_framework(config, world, problem.task, clock)
    identity = identity_of(asdict(config), problem.order.global_batch, problem.train.fingerprint())
    fresh = options.get("fresh", False)
    report = EventWriter(run_dir.events, print).append
    objects = kept_state(problem.task.state)
    hook = checkpoint_hook(config.checkpoint, identity, world, run_dir, report, fresh=fresh, state=objects)
    recorder = Recorder(records / f"{world.rank}.jsonl", world.rank, options, hook)
    recorder.watch(framework)
    trainer = wiring.make_trainer(config, world, problem, framework, clock, [hook, recorder])
    with closing(framework), closing(hook), closing(trainer.data):
        trainer.fit()
        recorder.write(
            final=checksums(framework, objects), weights=framework.weights_hash(), state=trainer.state.to_json()
        )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    except HpctrainError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # ends the other ranks too; an orderly exit would wait for them

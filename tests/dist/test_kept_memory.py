"""A rank keeps large blocks of memory that its steps would return to the kernel, and computes the same."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

from tests.support.command import events, hpctrain, write_run

BLOCK_PAGES = 64 * 256
"""Pages of a layer's activations."""
STEPS = 40


def test_steps_keep_large_blocks_unless_the_user_has_chosen(tmp_path: Path) -> None:
    said, faults, losses = {}, {}, {}
    for name, env in (("kept", {}), ("chosen", {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"})):
        folder = tmp_path / name
        folder.mkdir()
        task = {"task": "tests.tasks.torch_fresh_memory_task:task", "task_args": {"folder": str(folder)}}
        train = {"steps": STEPS, "global_batch": 1024}
        run = write_run(folder, name=name, **task, train=train, checkpoint={"enabled": False}, track={"every_steps": 1})
        said[name] = hpctrain("train", run, cwd=folder, env=env, warm="torch").output
        counts = list(map(int, (folder / "faults").read_text().split()))[STEPS // 2 :]
        of_steps = [after - before for before, after in itertools.pairwise(counts)]
        faults[name] = statistics.median(of_steps)  # now and then a step finds no gap that is large enough
        losses[name] = [event["loss"] for event in events(folder / "runs" / name, "train")]
    assert faults["kept"] < BLOCK_PAGES / 10
    assert "from step" in said["kept"] and "on it is kept" in said["kept"]
    assert faults["chosen"] > BLOCK_PAGES and "is kept" not in said["chosen"]
    assert losses["kept"] == losses["chosen"] and len(losses["kept"]) == STEPS

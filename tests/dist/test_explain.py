"""``hpctrain explain`` names what ended real runs on real ranks, and says so if it cannot know."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command import HPCTRAIN, ONE_ATTEMPT, assert_explained, hpctrain, misbehaving_run, wait_for
from tests.support.mpi import LAUNCH_S, rank_environment, run_in_group

pytestmark = pytest.mark.world_size(2)


@pytest.mark.tour
def test_a_rank_that_hangs(tmp_path):
    monitor = {"enabled": True, "hang_s": 8, "on_hang": "abort"}
    path = misbehaving_run(tmp_path, "sleep", monitor=monitor, reduce={"kind": "nccl"})
    hpctrain("run", "-n", 2, path, code=70, warm="torch")
    assert_explained(tmp_path / "run", "hang", "rank 1 did not join all_reduce", "in which rank 0 waits")


def test_checkpoints_that_are_all_damaged(tmp_path):
    path = misbehaving_run(tmp_path)
    hpctrain("run", "-n", 2, path, warm="torch")
    for shard in (tmp_path / "run" / "checkpoints").glob("step-*/*.h5"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 0xFF
        shard.write_bytes(content)
    assert hpctrain("run", "-n", 2, path, code=None, warm="torch").returncode != 0
    assert_explained(tmp_path / "run", "damaged_checkpoint")


UNREADABLE = """
import errno, os
from hpctrain.checkpoint import read_retry

read_retry.PAUSES_S = (0.01,)
really_open = os.open

def no_shards(path, *rest, **options):
    if "/shard-" in str(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)
    return really_open(path, *rest, **options)

os.open = no_shards
"""


def test_checkpoints_that_the_file_system_does_not_give(tmp_path):
    path = misbehaving_run(tmp_path)
    hpctrain("run", "-n", 2, path, warm="torch")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (tmp_path / "sitecustomize.py").write_text(UNREADABLE)
    hpctrain("run", "-n", 2, path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}, code=70)
    assert_explained(tmp_path / "run", "unreadable_checkpoint", "Input/output error")
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == checkpoints
    hpctrain("run", "-n", 2, path, warm="torch")


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A cgroup (version 1 or 2) with a real memory limit."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    group = parent / f"hpctrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"not permitted here: a memory control group ({error.strerror})")
    try:
        yield group / "cgroup.procs"
    finally:
        wait_for("the group is empty", lambda: not (group / "cgroup.procs").read_text().split())
        group.rmdir()


def test_a_rank_that_the_kernel_ends_for_its_memory(tmp_path):
    hungry = tmp_path / "hungry.py"
    hungry.write_text(
        "import numpy as np, torch, hpctrain\n"
        "def task(world):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    def loss(output, batch):\n"
        "        loss.kept = loss.kept + [np.ones(2**24)] if world.rank == 1 else []\n"
        "        return output.mean()\n"
        "    loss.kept = []\n"
        "    data = {'x': np.ones((64, 2), np.float32)}\n"
        "    return hpctrain.TorchTask(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), data)\n"
    )
    run = {"name": "run", "run_dir": str(tmp_path / "run"), "task": f"{hungry}:task", "reduce": {"kind": "mpi"}}
    run |= {"launch": ONE_ATTEMPT}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**run, "train": {"steps": 1000, "global_batch": 4}, "monitor": {"enabled": False}}))
    with memory_limit(2 * 2**30) as procs:
        words = ["bash", "-c", f'echo $$ > {procs} && exec "$@"', "bash", *HPCTRAIN, "run", "-n", "2", str(path)]
        result = run_in_group(words, rank_environment(), None, LAUNCH_S)
    assert result.returncode == 70, result.output
    assert_explained(tmp_path / "run", "out_of_memory", "rank 1")

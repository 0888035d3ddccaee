"""``hpctrain explain`` names what ended real runs on real ranks, and says so if it cannot know."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import Ended
from tests.support.command import HPCTRAIN, ONE_ATTEMPT, hpctrain, misbehaving_run, reaches_step, started, wait_for
from tests.support.mpi import LAUNCH_S, PATIENCE_S, rank_environment, run_in_group

pytestmark = [pytest.mark.world_size(2), pytest.mark.slow]


def explained(folder: Path) -> dict[str, Any]:
    """Output of the command for the run in a folder."""
    result = hpctrain("explain", folder / "run", "--json")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def said(answer: dict[str, Any]) -> str:
    return " ".join([answer["title"], *answer["evidence"], answer["advice"]])


@pytest.mark.parametrize(
    ("mode", "code", "cause", "parts"),
    [
        ("nan", 76, "nan", ["step 4", "rank 1", "samples"]),
        ("raise", 70, "exception", ["rank 1", "ValueError", "bad sample", "launch_task.py"]),
        ("raise-in-task", 70, "exception", ["rank 1", "no luck"]),
        ("kill", 70, "killed", ["rank 1", "SIGKILL"]),
        ("sys-exit", 70, "exception", ["rank 1", "sys.exit"]),
    ],
)
def test_ranks_that_misbehave(
    ended: Callable[[str], Ended], mode: str, code: int, cause: str, parts: list[str]
) -> None:
    run = ended(mode)
    assert run.said.returncode == code, run.said.output
    answer = explained(run.folder)
    assert answer["cause"] == cause, answer
    assert [part for part in parts if part not in said(answer)] == []
    assert answer["advice"]


@pytest.mark.tour
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    monitor = {"enabled": True, "hang_s": 8, "on_hang": "abort"}
    path = misbehaving_run(tmp_path, "sleep", monitor=monitor, reduce={"kind": "nccl"})
    hpctrain("run", "-n", 2, path, code=70, warm="torch")
    answer = explained(tmp_path)
    assert answer["cause"] == "hang", answer
    assert "rank 1 did not join all_reduce" in said(answer) and "in which rank 0 waits" in said(answer)


def test_a_run_that_was_asked_to_stop(tmp_path: Path) -> None:
    path = misbehaving_run(tmp_path, train={"steps": 1000}, track={"every_steps": 1})
    with started("run", "-n", 2, path, env={"STEP_S": "0.05"}, warm="torch") as run:
        wait_for("step", reaches_step(tmp_path / "run", 2))
        (tmp_path / "run" / "STOP").touch()
        run.communicate(timeout=PATIENCE_S)
    answer = explained(tmp_path)
    assert answer["cause"] == "stopped", answer
    assert "STOP" in said(answer) and "newest checkpoint" in said(answer)


def test_checkpoints_that_are_all_damaged(tmp_path: Path) -> None:
    path = misbehaving_run(tmp_path)
    hpctrain("run", "-n", 2, path, warm="torch")
    for shard in (tmp_path / "run" / "checkpoints").glob("step-*/*.h5"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 0xFF
        shard.write_bytes(content)
    assert hpctrain("run", "-n", 2, path, code=None, warm="torch").returncode != 0
    answer = explained(tmp_path)
    assert answer["cause"] == "damaged_checkpoint", answer


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


def test_checkpoints_that_the_file_system_does_not_give(tmp_path: Path) -> None:
    path = misbehaving_run(tmp_path)
    hpctrain("run", "-n", 2, path, warm="torch")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (tmp_path / "sitecustomize.py").write_text(UNREADABLE)
    hpctrain("run", "-n", 2, path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}, code=70)
    answer = explained(tmp_path)
    assert answer["cause"] == "unreadable_checkpoint", answer
    assert "Input/output error" in said(answer)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == checkpoints
    hpctrain("run", "-n", 2, path, warm="torch")


def test_a_run_that_fails_again_and_again(tmp_path: Path) -> None:
    path = misbehaving_run(tmp_path, "raise", launch={"max_failures": 2}, checkpoint={"enabled": False})
    hpctrain("run", "-n", 2, path, code=76, warm="torch")
    answer = explained(tmp_path)
    assert answer["cause"] in ("no_progress", "exception"), answer
    assert "2 attempts in a row" in said(answer)


def test_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("not permitted here: a mount namespace")
    run = tmp_path / "run"
    run.mkdir()
    path = misbehaving_run(tmp_path, "fill", task_args={"rank": 0})
    script = 'mount -t tmpfs -o size=4M tmpfs "$1"; shift; "$@"; rm -f "$RUN/filler"; hpctrain explain "$RUN" --json'
    words = ["unshare", "--mount", "bash", "-c", script, "bash", str(run), *HPCTRAIN, "run", "-n", "2", str(path)]
    result = run_in_group(words, rank_environment({"RUN": str(run)}), None, LAUNCH_S)
    answer = json.loads(result.stdout[result.stdout.index('{\n "cause"') :])
    assert answer["cause"] == "disk_full", answer


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


def test_a_rank_that_the_kernel_ends_for_its_memory(tmp_path: Path) -> None:
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
    answer = explained(tmp_path)
    assert answer["cause"] == "out_of_memory", answer
    assert "rank 1" in said(answer)


def test_what_is_not_known_is_said_to_be_unknown(ended: Callable[[str], Ended], tmp_path: Path) -> None:
    shutil.copytree(ended("kill").run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "ranks")
    (tmp_path / "run" / "run.json").unlink()
    events = tmp_path / "run" / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    old = [json.dumps(line | {"time": line["time"] - 120}) for line in lines]  # recent ones may belong to a live run
    events.write_text("".join(f"{line}\n" for line in old))
    assert explained(tmp_path)["cause"] == "unknown"


def test_a_run_that_completed(ended: Callable[[str], Ended]) -> None:
    assert explained(ended("").folder)["cause"] == "completed"

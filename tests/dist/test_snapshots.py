"""Snapshots in node memory survive killed ranks, so that a restart repeats few steps, whatever is on disk."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hpctrain.checkpoint.snapshots import PREFIX, home_name
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from tests.support.command import (
    PROJECT,
    events,
    hpctrain,
    last_words,
    leftovers,
    ranks_of,
    started,
    wait_for,
    write_run,
)
from tests.support.gate import Gate
from tests.support.mpi import LAUNCH_S

STEPS = 120
EVERY = 5


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in node memory that must be empty at the end. Other tests use /dev/shm itself."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
        assert not list(Path(folder).iterdir())


def digits(folder: Path, memory: dict[str, object], every_steps: int = 100, held_at: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    return write_run(
        folder,
        task=f"{PROJECT}/tests/tasks/held_torch_digits.py:task",
        task_args={"gate": str(folder / "gate"), "at": held_at, "pause_s": 0.05},
        run_dir=str(folder / "run"),
        train={"steps": STEPS, "global_batch": 32, "threads": 1},
        checkpoint={"every_steps": every_steps, "tiers": {"memory": memory}},
        reduce={"kind": "mpi"},
        track={"every_steps": 1},
        monitor={"window_steps": 4},
    )


def kill_a_rank(pid: int) -> None:
    ranks_of(pid)[-1].kill()


def weights(run: Path, attempt: int = 1) -> set[str]:
    return {word["weights_hash"] for word in last_words(run, attempt)}


@pytest.mark.world_size(4)
def test_a_killed_rank_costs_no_more_than_the_interval_of_the_memory_tier(tmp_path, memory):
    hpctrain("run", "-n", 4, digits(tmp_path / "whole", {}), warm="torch")
    run = tmp_path / "run"
    path, gate = digits(tmp_path, {"every_steps": EVERY, "path": str(memory)}, held_at=48), Gate(tmp_path / "gate")
    gate.close(1)
    with started("run", "-n", 4, path, warm="torch") as child:
        gate.await_ranks(4)
        (home,) = {each.parent.parent for each in memory.glob(f"{PREFIX}*/attempt-000001/step-*")}
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        kill_a_rank(child.pid)
        gate.open()
        said, errors = child.communicate(timeout=LAUNCH_S)
    assert child.returncode == 0, said + errors
    [resumed] = events(run, "resumed")
    assert resumed["tier"] == "memory" and resumed["step"] % EVERY == 0 and resumed["step"] >= 40
    [recovered] = events(run, "recovered")
    assert recovered["repeated_steps"] < 2 * EVERY  # a snapshot is sealed some steps after it is taken
    assert len({event["step"] for event in events(run, "train")}) == STEPS
    assert weights(run, 2) == weights(tmp_path / "whole" / "run"), "bit for bit"
    assert not leftovers(tmp_path)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_a_failed_run_leaves_is_resumed_on_two_ranks_or_passed_over_if_damaged(tmp_path, memory, is_damaged):
    run, gate = tmp_path / "run", Gate(tmp_path / "gate").close(1)
    path = digits(tmp_path, {"every_steps": EVERY, "path": str(memory)}, every_steps=25, held_at=38)
    with started("run", "-n", 4, path, "--launch.max_failures", 0, warm="torch") as child:
        gate.await_ranks(4)
        kill_a_rank(child.pid)
        gate.open()
        child.communicate(timeout=LAUNCH_S)
    snapshots = sorted(memory.glob(f"{home_name(Attempts(RunDir(run)))}/attempt-000001/step-*"))
    for folder in snapshots if is_damaged else ():
        shard = next(folder.glob("shard-00002-*"))
        shard.write_bytes(shard.read_bytes()[:-1])
    hpctrain("run", "-n", 2, path, warm="torch")
    [resumed] = events(run, "resumed")
    assert (resumed.get("tier") == "memory") != is_damaged, resumed
    assert resumed["ranks"] == 4
    assert [each["step"] for each in resumed.get("rejected") or ()] == (
        [int(each.name.removeprefix("step-")) for each in reversed(snapshots)] if is_damaged else []
    )
    assert len({event["step"] for event in events(run, "train")}) == STEPS


@pytest.mark.world_size(2)
def test_a_run_whose_folder_is_lost_continues_from_the_object_store(tmp_path, memory):
    pytest.importorskip("obstore", reason="the extra lake is not installed")
    run, path, gate = tmp_path / "run", digits(tmp_path, {}, every_steps=20, held_at=90), Gate(tmp_path / "gate")
    hpctrain("run", "-n", 2, path, "--train.steps", 100, warm="torch")
    whole = weights(run)
    shutil.rmtree(run)
    options = (
        "--train.steps",
        100,
        "--checkpoint.tiers.store.url",
        f"file://{tmp_path}/store",
        "--launch.max_failures",
        0,
    )
    gate.close(1)
    with started("run", "-n", 2, path, *options, warm="torch") as child:
        wait_for("a copy", lambda: any(event["step"] >= 40 for event in events(run, "checkpoint_stored")))
        kill_a_rank(child.pid)
        gate.open()
        child.communicate(timeout=LAUNCH_S)
    shutil.rmtree(run)
    hpctrain("run", "-n", 2, path, *options, warm="torch")
    [resumed] = events(run, "resumed")
    assert resumed["tier"] == "store" and resumed["step"] >= 40 and resumed["ranks"] == 2
    assert weights(run) == whole, "bit for bit"
    assert events(run, "checkpoint_stored")[-1]["step"] == 100 and not leftovers(tmp_path)

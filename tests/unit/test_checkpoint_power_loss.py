"""The order of system calls, as strace records it, and what a power loss at any of them leaves."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.group import Group
from tests.support.power_loss import Call, Disk, parse

SEED = int.from_bytes(os.urandom(4), "little")
STATES = 6
"""Random states tried after each call, beside the luckiest and the unluckiest."""

PROGRAM = """
import os, sys
import numpy as np
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore

store = CheckpointStore(sys.argv[1], keep=Retention(last=2))
for save, step in enumerate((1, 2, 2, 3, 4)):
    store.save({"model/weight": np.full(300, save, np.float32)}, meta={"save": save}, step=step)
    os.write(1, b"announced %d" % step)
"""
TRACED = "openat,mkdir,rename,renameat,renameat2,unlink,unlinkat,rmdir,pwrite64,write,fsync,fdatasync"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    """The folder that existed before, and all calls below it, with announcements among them."""
    if not shutil.which("strace"):
        pytest.skip("this machine has no strace")
    root = tmp_path_factory.mktemp("recorded").resolve()
    log, program = root / "log", root / "program.py"
    program.write_text(PROGRAM)
    (root / "disk").mkdir()
    trace = ["strace", "-f", "-y", "-xx", "-s", "1000000", "-o", str(log), "-e", f"trace={TRACED}"]
    folder = root / "disk" / "run" / "checkpoints"
    subprocess.run([*trace, sys.executable, str(program), str(folder)], check=True, timeout=120, capture_output=True)
    disk = Disk(str(root / "disk"))
    calls = [call for call in parse(log.read_text()) if disk.inside(call.path) or call.data.startswith(b"announced")]
    assert sum(call.data.startswith(b"announced") for call in calls) == 5
    return root / "disk", calls


def test_everything_is_synced_before_the_rename_and_the_rename_before_anything_else(
    recorded: tuple[Path, list[Call]],
) -> None:
    _, calls = recorded
    dirty: set[str] = set()
    unsynced_folders: set[str] = set()
    commits = 0
    for call in calls:
        parent = str(Path(call.path).parent)
        if call.name == "fsync":
            dirty.discard(call.path)
            unsynced_folders.discard(call.path)
        elif call.name in ("create", "write", "append") and not call.data.startswith(b"announced"):
            dirty.add(call.path)
            unsynced_folders.add(parent)
        elif call.name == "unlink":
            dirty.discard(call.path)
        elif call.name == "rename" and Path(call.other).name.startswith("step-"):
            commits += 1
            below = [path for path in dirty | unsynced_folders if f"{path}/".startswith(f"{call.path}/")]
            assert not below, f"renamed before {below} was synced"
            unsynced_folders.add(parent)
        elif call.data.startswith(b"announced"):
            assert parent_of_steps(calls) not in unsynced_folders, "announced before the folder's names were synced"
    assert commits == 5


def parent_of_steps(calls: list[Call]) -> str:
    return next(str(Path(call.other).parent) for call in calls if call.name == "rename")


@pytest.mark.slow
def test_a_power_loss_after_any_call_leaves_a_sound_newest_checkpoint(
    recorded: tuple[Path, list[Call]], tmp_path: Path
) -> None:
    root, calls = recorded
    disk, luck = Disk(str(root)), random.Random(SEED)
    announced = None
    for number, call in enumerate(calls):
        if call.data.startswith(b"announced"):
            announced = int(call.data.split()[1])
        else:
            disk.do(call)
        for state, chance in enumerate([0.0, 1.0, *[luck] * STATES]):
            left = tmp_path / f"{number}-{state}"
            left.mkdir()
            disk.leave(left, chance)
            restarts(left / "run" / "checkpoints", announced, f"seed {SEED}, call {number}: {call.name} {call.path}")
            shutil.rmtree(left)


def restarts(folder: Path, announced: int | None, where: str) -> None:
    """What the next attempt does: sweep, list, load."""
    store = CheckpointStore(folder, group=Group("alone"))
    store.sweep()
    steps = store.steps()
    if not steps:
        assert announced is None, where
        return
    for step in steps:  # not only the newest: nothing partial is ever listed
        loaded = store.load(step)
        np.testing.assert_array_equal(loaded.arrays["model/weight"], np.float32(loaded.meta["save"]))
        assert step == (1, 2, 2, 3, 4)[loaded.meta["save"]], where
    assert announced is None or steps[-1] >= announced, where

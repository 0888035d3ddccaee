"""Checks of recorded system calls of a checkpoint store, for any number of ranks."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.group import Group
from tests.support.power_loss import Call, Disk, parse

STEPS = (1, 2, 2, 3, 4)
"""Steps that the program saves; the index of a save is in its ``meta`` and its values."""
PROGRAM = """
import os, sys
import numpy as np
from hpctrain.checkpoint.policy import Retention
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.world import alone, connect

world = {"alone": alone, "connect": connect}[sys.argv[2]]()
announced = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT)
store = CheckpointStore(sys.argv[1], keep=Retention(last=2), group=world.everyone)
for save, step in enumerate((1, 2, 2, 3, 4)):
    arrays = {f"model/weight{i}": np.full(300, save, np.float32) for i in range(4)}
    store.save(arrays, meta={"save": save}, step=step)
    if world.rank == 0:
        os.write(announced, b"%d" % step)
    world.everyone.barrier("announce one after the other")
"""
ANNOUNCED = "announced"
"""File that stands for the user, who is told of each save."""
TRACED = "openat,mkdir,rename,renameat,renameat2,unlink,unlinkat,rmdir,pwrite64,write,fsync,fdatasync"
STATES = 6
"""Number of random states tried after each call, besides the best and the worst."""


def record(root: Path, launch: Sequence[str], environment: Mapping[str, str], world: str) -> list[Call]:
    """Run the program and return its calls below ``root/disk``, including announcements.

    Args:
        root: an empty folder.
        launch: command prefix for the program, a Python file, and its arguments.
        environment: environment of the command.
        world: ``alone``, or ``connect`` for a program on ranks.
    """
    if not shutil.which("strace"):
        pytest.skip("this machine has no strace")
    log, program = root / "log", root / "program.py"
    program.write_text(PROGRAM)
    (root / "disk").mkdir()
    trace = ["strace", "-f", "-y", "-xx", "-s", "1000000", "-o", str(log), "-e", f"trace={TRACED}"]
    command = [*trace, *launch, str(program), str(root / "disk" / "run" / "checkpoints"), world]
    command.append(str(root / ANNOUNCED))
    subprocess.run(command, check=True, timeout=120, capture_output=True, env=environment)
    disk = Disk(str(root / "disk"))
    calls = [call for call in parse(log.read_text()) if disk.inside(call.path) or announces(call)]
    assert sum(map(announces, calls)) == len(STEPS)
    return calls


def announces(call: Call) -> bool:
    """Whether a call tells the user that a checkpoint is saved."""
    return call.name == "append" and Path(call.path).name == ANNOUNCED


def check_order(calls: Sequence[Call]) -> None:
    """Check that everything is synced before the rename, and the rename before the announcement."""
    top = next(str(Path(call.other).parent) for call in calls if call.name == "rename")
    dirty: set[str] = set()
    unsynced_folders: set[str] = set()
    commits = 0
    for call in calls:
        parent = str(Path(call.path).parent)
        if announces(call):
            assert top not in unsynced_folders, "announced before the folder's names were synced"
        elif call.name == "fsync":
            dirty.discard(call.path)
            unsynced_folders.discard(call.path)
        elif call.name in ("create", "write", "append"):
            dirty.add(call.path)
            unsynced_folders.add(parent)
        elif call.name == "unlink":
            dirty.discard(call.path)
        elif call.name == "rename" and Path(call.other).name.startswith("step-"):
            commits += 1
            below = [path for path in dirty | unsynced_folders if f"{path}/".startswith(f"{call.path}/")]
            assert not below, f"renamed before {below} was synced"
            unsynced_folders.add(parent)
    assert commits == len(STEPS)


def check_losses(root: Path, calls: Sequence[Call], scratch: Path, seed: int) -> None:
    """Check that a power loss after any call leaves an intact checkpoint at least as new as the last announced."""
    disk, luck = Disk(str(root / "disk")), random.Random(seed)
    announced = None
    for number, call in enumerate(calls):
        if announces(call):
            announced = int(call.data)
        else:
            disk.do(call)
        for state, chance in enumerate([0.0, 1.0, *[luck] * STATES]):
            left = scratch / f"{number}-{state}"
            left.mkdir()
            disk.leave(left, chance)
            restarts(left / "run" / "checkpoints", announced, f"seed {seed}, call {number}: {call.name} {call.path}")
            shutil.rmtree(left)


def restarts(folder: Path, announced: int | None, where: str) -> None:
    """Do what the next attempt does (sweep, list, load), and check the checkpoints."""
    store = CheckpointStore(folder, group=Group("alone"))
    store.sweep()
    steps = store.steps()
    if not steps:
        assert announced is None, where
        return
    for step in steps:  # all, not only the newest, because a partial one must never be listed
        loaded = store.load(step)
        for array in loaded.arrays.values():
            np.testing.assert_array_equal(array, np.float32(loaded.meta["save"]))
        assert step == STEPS[loaded.meta["save"]], where
    assert announced is None or steps[-1] >= announced, where

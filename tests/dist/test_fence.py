"""A supervisor presumed dead that wakes up after another took over its run ends by itself and changes nothing."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess

import psutil
import pytest

from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import LiveLock, myself, read
from tests.support.command import (
    endings,
    hpctrain,
    is_parent,
    leftovers,
    misbehaving_run,
    processes_of,
    started,
    wait_for,
)
from tests.support.mpi import PATIENCE_S

SLOWLY = {"STEP_S": "0.1"}
LONG = {"train": {"steps": 5000}, "checkpoint": {"every_steps": 2, "keep_last": 1000}}


def take_over(run: RunDir) -> LiveLock:
    """Do what a supervisor on another machine does first if the holder has long been silent."""
    for path in (run.lock_file, *run.path.glob("locks/run/*.json")):
        os.utime(path, (1.0, 1.0))
    lock = LiveLock(run, dataclasses.replace(myself(), machine="another machine"))
    lock.acquire()
    assert Attempts(run).begin() == 2
    return lock


def stop(family: list[psutil.Process]) -> None:
    for process in family:
        process.suspend()
    for process in family:
        wait_for("stop", lambda process=process: process.status() == psutil.STATUS_STOPPED)


def ends_replaced(child: subprocess.Popen[str], run: RunDir, lock: LiveLock, steps: list[str]) -> str:
    """Wait for the end of the replaced attempt, check what it left, and return its output."""
    said = child.communicate(timeout=PATIENCE_S)[1]
    assert child.returncode == 76, said
    assert "has been replaced by" in said or "has been taken over by" in said
    lock.check()
    assert read(run.lock_file) == lock.holder
    assert Attempts(run).info()["fence"] == 2 and Attempts(run).info()["attempts"][0]["verdict"]["code"] == "in_use"
    assert Attempts(run).all()[1].verdict is None
    assert committed(run) == steps
    assert not leftovers(run.path.parent)
    return said


def runs(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def committed(run: RunDir) -> list[str]:
    return sorted(path.parent.name for path in run.checkpoints.glob("step-*/manifest.json"))


def test_a_single_process(tmp_path):
    path, run = misbehaving_run(tmp_path, reduce={"kind": "none"}, **LONG), RunDir(tmp_path / "run")
    with started("train", path, env=SLOWLY) as child:
        wait_for("checkpoint", lambda: committed(run))
        stop([psutil.Process(child.pid)])
        lock, steps = take_over(run), committed(run)
        child.send_signal(signal.SIGCONT)
        said = ends_replaced(child, run, lock, steps)
    assert said.count("hpctrain: ") == 1, "one sentence"
    assert endings(run.path) == ["failed"]
    lock.release()
    hpctrain("train", path, "--train.steps", int(steps[-1].removeprefix("step-")) + 2, warm="torch")
    assert Attempts(run).info()["fence"] == 3


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_all_processes_of_a_supervised_run(tmp_path):
    path, run = misbehaving_run(tmp_path, **LONG), RunDir(tmp_path / "run")
    with started("run", "-n", 2, path, env=SLOWLY) as child:
        wait_for("checkpoint", lambda: committed(run))
        family = [psutil.Process(child.pid), *processes_of(child.pid)]
        stop(family)
        lock, steps = take_over(run), committed(run)
        for process in family:
            process.resume()
        ends_replaced(child, run, lock, steps)
    lock.release()


@pytest.mark.world_size(2)
def test_ranks_whose_supervisor_sleeps_on(tmp_path):
    path, run = misbehaving_run(tmp_path, **LONG), RunDir(tmp_path / "run")
    with started("run", "-n", 2, path, env=SLOWLY) as child:
        wait_for("checkpoint", lambda: committed(run))
        stop([psutil.Process(child.pid)])
        lock, below = take_over(run), [each for each in processes_of(child.pid) if not is_parent(each)]
        wait_for("end of the ranks, which look for themselves", lambda: not any(map(runs, below)))
        steps = committed(run)
        child.send_signal(signal.SIGCONT)
        ends_replaced(child, run, lock, steps)
    assert endings(run.path) == ["failed", "failed"]
    lock.release()

"""The monitor in `hpctrain run` changes no result, names the slow rank, and ends a hung attempt resumably."""

import os
import signal
from pathlib import Path

import pytest

from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import read as read_words
from tests.support.command import (
    PROJECT,
    events,
    hpctrain,
    last_words,
    leftovers,
    misbehaving_run,
    ranks_of,
    reaches_step,
    started,
    wait_for,
)
from tests.support.mpi import PATIENCE_S

pytestmark = pytest.mark.world_size(2)
MONITOR = {"enabled": True, "window_steps": 8, "hang_s": 8}
SLOW = {"train": {"steps": 5000}, "track": {"every_steps": 1}}


NOTE_COLLECTIVES = """
import os
from hpctrain.comm import group
from hpctrain.reduce import mpi_allreduce, shm_allreduce

def noting(owner, name):
    call = getattr(owner, name)
    def noted(*args, **keys):
        if getattr(args[0], "size", 2) == 1:  # a group of one rank waits for nobody
            return call(*args, **keys)
        with open(os.path.join(os.environ["NOTES"], str(os.getpid())), "a") as notes:
            print(owner.__name__, name, file=notes)
        return call(*args, **keys)
    setattr(owner, name, noted)

for name in ("barrier", "allgather", "broadcast", "sum", "broadcast_array", "begin_min"):
    noting(group.Group, name)
for owner in (mpi_allreduce.FlatAllreduce, shm_allreduce.ShmAllreduce, shm_allreduce.SmallShmAllreduce):
    noting(owner, "finish")
"""
"""A sitecustomize.py that records each collective call of a process."""


def test_weights_and_collectives_are_the_same_with_and_without(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NOTE_COLLECTIVES)
    hashes, calls = set(), set()
    for enabled in (True, False):
        folder = tmp_path / str(enabled)
        notes = folder / "notes"
        notes.mkdir(parents=True)
        environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}", "NOTES": str(notes)}
        run = misbehaving_run(folder, monitor={**MONITOR, "enabled": enabled})
        hpctrain("run", "-n", 2, run, env=environment)
        hashes |= {word["weights_hash"] for word in last_words(folder / "run")}
        calls |= {note.read_text().partition("SmallShmAllreduce finish")[2] for note in notes.iterdir()}
        assert (folder / "run" / "monitor" / "live.json").exists() == enabled
    assert len(hashes) == 1
    [after_first_exchange] = calls  # the same calls in the same order on every rank; before it, the agents connect
    assert after_first_exchange.count("SmallShmAllreduce finish") == 11, "one exchange a step"


@pytest.mark.tour
def test_a_stopped_rank_ends_the_attempt_as_a_hang_and_the_same_command_goes_on(tmp_path):
    path = misbehaving_run(tmp_path, monitor=MONITOR, checkpoint={"every_steps": 5}, **SLOW)
    with started("run", "-n", 2, path, env={"STEP_S": "0.05"}) as child:
        wait_for("step", reaches_step(tmp_path / "run", 20))
        os.kill(ranks_of(child.pid)[-1].pid, signal.SIGSTOP)
        stdout, stderr = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 70, stderr
    (hang,) = events(tmp_path / "run", "hang")
    [culprit] = hang["ranks"]
    assert (culprit["state"], hang["action"]) == ("stopped", "abort")
    assert Path(tmp_path / "run" / culprit["stack"]).read_text()
    words = read_words(RunDir(tmp_path / "run"), 1)
    assert words is not None and words.verdict is not None
    verdict = words.verdict.to_json()
    assert (verdict["code"], verdict["action"], verdict["rank"]) == ("hang", "do_not_requeue", culprit["rank"])
    assert f"rank {culprit['rank']} on" in stdout + stderr
    assert not leftovers(tmp_path)
    done = RunDir(tmp_path / "run").newest_checkpoint_step()
    assert done is not None
    hpctrain("run", "-n", 2, path, "--train.steps", done + 20, warm="torch")
    assert events(tmp_path / "run", "resumed")[0]["step"] == done

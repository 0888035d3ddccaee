"""`hpctrain run` on real ranks is one job, stops on request, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.system.processes import own_session
from tests.support.command import (
    assert_explained,
    endings,
    events,
    hpctrain,
    last_words,
    leftovers,
    misbehaving_run,
    processes_of,
    ranks_of,
    reaches_step,
    started,
    wait_for,
)
from tests.support.hostile import SOMEBODY
from tests.support.mpi import PATIENCE_S, find_mpirun, rank_environment

pytestmark = pytest.mark.world_size(2)
LONG = {"train": {"steps": 2000}, "track": {"every_steps": 1}}
SLOWLY = {"STEP_S": "0.1"}
"""Set in the environment, because a resumed run must not change its task_args."""


def test_who_takes_the_names_of_mpiruns_session_folders_stops_nobody(tmp_path):
    """Their names contain a guessable number, and any user may create them in a shared folder."""

    def before():
        folder = tmp_path / f"ompi.{os.getpid()}"
        folder.mkdir()
        (folder / "pmix.vm.tool").touch()
        folder.chmod(0)
        if os.geteuid() == 0:
            os.chown(folder, SOMEBODY, SOMEBODY)

    launcher = find_mpirun()
    assert launcher
    with own_session(rank_environment({"TMPDIR": str(tmp_path)})) as session:
        words = [launcher, "-n", "1", "true"]
        started = subprocess.run(words, env=session, preexec_fn=before, timeout=PATIENCE_S, check=False)
    assert started.returncode == 0
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("ompi."), "what is not ours stays; of ours nothing is left"


def test_one_rank_needs_no_mpirun(tmp_path):
    hpctrain("run", misbehaving_run(tmp_path, reduce={"kind": "none"}), warm="torch")
    assert endings(tmp_path / "run") == ["completed"]


def test_a_rank_may_stand_alone_without_supervisor(tmp_path):
    hpctrain("train", misbehaving_run(tmp_path, reduce={"kind": "none"}), warm="torch")
    assert endings(tmp_path / "run") == ["completed"]
    assert Attempts(RunDir(tmp_path / "run")).info()["attempts"][0]["verdict"]["action"] == "done"


def test_ranks_under_plain_mpirun_leave_the_same(tmp_path, mpirun):
    mpirun(2, "hpctrain", "train", misbehaving_run(tmp_path), warm="torch")
    assert endings(tmp_path / "run") == ["completed", "completed"]
    assert len({word["weights_hash"] for word in last_words(tmp_path / "run")}) == 1
    assert events(tmp_path / "run", "run_started")[0]["ranks"] == 2


def ask_by_term(child, folder: Path) -> None:
    child.send_signal(signal.SIGTERM)


def ask_by_file(child, folder: Path) -> None:
    (folder / "run" / "STOP").touch()


def ask_one_rank(child, folder: Path) -> None:
    ranks_of(child.pid)[-1].send_signal(signal.SIGUSR1)


@pytest.mark.tour
@pytest.mark.parametrize("ask", [ask_by_term, ask_by_file, ask_one_rank])
def test_a_request_stops_with_a_checkpoint_and_the_same_command_goes_on(tmp_path, ask):
    path = misbehaving_run(tmp_path, **LONG)
    with started("run", "-n", 2, path, env=SLOWLY, warm="torch") as child:
        wait_for("step", reaches_step(tmp_path / "run", 3))
        ask(child, tmp_path)
        _, stderr = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 75, stderr
    assert endings(tmp_path / "run") == ["stop_requested", "stop_requested"]
    (stop,) = events(tmp_path / "run", "stop_requested")
    steps = {word["step"] for word in last_words(tmp_path / "run")}
    assert steps == {stop["step"]}, "the ranks stop after the same step"
    assert RunDir(tmp_path / "run").newest_checkpoint_step() == stop["step"]
    if ask is ask_by_file:
        assert_explained(tmp_path / "run", "stopped", "STOP", "newest checkpoint")
    if ask is not ask_by_term:
        return
    hpctrain("run", "-n", 2, path, "--train.steps", stop["step"] + 5, warm="torch")
    trained = [event["step"] for event in events(tmp_path / "run", "train")]
    assert trained == list(range(1, stop["step"] + 6)), "no step is missing, none counts twice"
    assert events(tmp_path / "run", "resumed")[0]["step"] == stop["step"]


def test_a_plain_rank_stops_on_a_signal(tmp_path):
    path = misbehaving_run(tmp_path, reduce={"kind": "none"}, **LONG)
    with started("train", path, env=SLOWLY, warm="torch") as child:
        wait_for("step", reaches_step(tmp_path / "run", 2))
        child.terminate()
        child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 75
    assert endings(tmp_path / "run") == ["stop_requested"]


def test_a_second_interrupt_ends_at_once(tmp_path):
    with started("run", "-n", 2, misbehaving_run(tmp_path, "sleep", **LONG), warm="torch") as child:
        wait_for("step", reaches_step(tmp_path / "run", 3))
        child.send_signal(signal.SIGINT)
        wait_for("note of the first", (tmp_path / "run" / "STOP").exists)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 70, "and without the time that ranks get after the first"
    assert "second Ctrl-C" in stderr
    assert not leftovers(tmp_path)


def test_ranks_that_do_not_stop_in_time_are_ended(tmp_path):
    sections = {**LONG, "launch": {"stop_grace_s": 2}}
    with started("run", "-n", 2, misbehaving_run(tmp_path, "sleep", **sections), warm="torch") as child:
        wait_for("step", reaches_step(tmp_path / "run", 3))
        child.terminate()
        _, stderr = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 70
    assert "did not stop within 2 s" in stderr
    assert "launch.stop_grace_s" in stderr
    assert not leftovers(tmp_path)


def test_a_stop_does_not_wait_for_processes_that_linger_after_their_last_words(tmp_path):
    with started("run", "-n", 2, misbehaving_run(tmp_path, "linger", **LONG), env=SLOWLY) as child:
        wait_for("step", reaches_step(tmp_path / "run", 5))
        child.terminate()
        _, stderr = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 75, stderr
    assert endings(tmp_path / "run") == ["stop_requested", "stop_requested"]
    assert not leftovers(tmp_path)


@pytest.mark.tour
def test_a_killed_rank_takes_the_others_down_within_seconds(tmp_path):
    with started("run", "-n", 2, misbehaving_run(tmp_path, **LONG), env=SLOWLY, warm="torch") as child:
        wait_for("step", reaches_step(tmp_path / "run", 3))
        ranks_of(child.pid)[1].kill()
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == 70
    assert "was killed by SIGKILL" in stderr
    assert stderr.count("hpctrain: ") == 1
    assert sorted(endings(tmp_path / "run")) == ["killed", "taken_down"]
    assert not leftovers(tmp_path)


@pytest.mark.tour
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    with started("run", "-n", 2, misbehaving_run(tmp_path, **LONG), env=SLOWLY) as child:
        wait_for("step", reaches_step(tmp_path / "run", 3))
        family = processes_of(child.pid)
        assert len(family) >= 3, "mpirun and two ranks"
        child.kill()
        child.wait()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    hpctrain("run", "-n", 2, misbehaving_run(tmp_path, **{**LONG, "train": {"steps": 12}}), warm="torch")
    assert Attempts(RunDir(tmp_path / "run")).info()["fence"] == 2


@pytest.mark.tour
def test_a_plain_command_is_watched_too(tmp_path):
    run = {"name": "plain", "run_dir": str(tmp_path / "run"), "launch": {"command": ["bash", "-c", "exit 3"]}}
    run["train"] = {"steps": 1, "global_batch": 1}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run))
    result = hpctrain("run", "-n", 2, path, code=70)
    assert "3" in result.stderr


def test_more_ranks_than_cores_are_said(tmp_path):
    ranks = len(os.sched_getaffinity(0)) + 1
    result = hpctrain("run", "-n", ranks, misbehaving_run(tmp_path, train={"global_batch": 2 * ranks}), warm="torch")
    assert f"{ranks} ranks share" in result.stderr
    assert endings(tmp_path / "run") == ["completed"] * ranks

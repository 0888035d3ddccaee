"""Of all who work on one run folder one is the newest: numbers are given once, and whoever is replaced learns it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm.world import alone
from hpctrain.errors import Code, ExitCode, Replaced, UserError
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.supervisor import supervise
from hpctrain.rank.stop_requests import StopRequests
from hpctrain.run import live_lock
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import TO_SUBMIT, LiveLock, at_work, myself, read
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.system.signals import StopSignals
from tests.support.command import wait_for
from tests.support.mpi import PATIENCE_S
from tests.support.programs import write_programs

ELSEWHERE = {"machine": "another machine", "host": "n9"}

PREAMBLE = """
import dataclasses, errno, json, os, signal, sys, time
from pathlib import Path
from hpctrain.errors import Replaced, UserError
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.errors import Code
from hpctrain.run.attempts import Attempt
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import UniqueIds
from hpctrain.system.files import create_exclusively
from hpctrain.run.verdict import failed_with
run = RunDir(Path(sys.argv[1]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv(ATTEMPT, raising=False)
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@contextmanager
def children(run: RunDir, program: str, count: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that run a program on a run folder; whatever is left of them at the end is killed."""
    words = [sys.executable, "-c", PREAMBLE + program, str(run.path)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    try:
        yield started
    finally:
        for child in started:
            child.kill()
            child.communicate()


def outputs(run: RunDir, program: str, count: int) -> list[str]:
    """What processes that run a program at the same time print, line by line."""
    with children(run, program, count) as started:
        said = [child.communicate(timeout=120)[0] for child in started]
        assert [child.returncode for child in started] == [0] * count
    return [line for text in said for line in text.splitlines()]


def await_stopped(child: subprocess.Popen[str]) -> None:
    """Returns when a process has stopped itself."""
    wait_for("stop", lambda: Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")


def take_over(run: RunDir) -> LiveLock:
    """What a supervisor on another machine does, that has not heard of the holder for long."""
    for path in (*run.path.glob("run.lock"), *run.path.glob("locks/run/*.json")):
        os.utime(path, (1.0, 1.0))
    lock = LiveLock(run, dataclasses.replace(myself(), **ELSEWHERE))
    lock.acquire()
    return lock


# Numbers


@pytest.mark.slow
def test_no_number_is_given_twice(run):
    program = "ids = UniqueIds(run.path / 'n', run.path)\nfor _ in range(1000): print(ids.take(b''))"
    taken = sorted(map(int, outputs(run, program, 3)))
    assert taken == list(range(1, 3001))


@pytest.mark.slow
def test_attempts_that_begin_and_end_at_the_same_time_are_all_recorded(run):
    program = """
for turn in range(20):
    number = Attempts(run).begin(Attempt(restarts=turn))
    Attempts(run).end(number, failed_with(Code.KILLED, str(turn), ""), [])
"""
    outputs(run, program, 3)
    attempts = Attempts(run).all()
    assert [attempt.number for attempt in attempts] == list(range(1, 61))
    assert Attempts(run).info()["fence"] == 60
    assert all(attempt.verdict and attempt.verdict.reason == str(attempt.restarts) for attempt in attempts)
    assert Counter(attempt.restarts for attempt in attempts) == dict.fromkeys(range(20), 3)


SLOW_DISK = """
def slow(handle, fsync=os.fsync):
    os.fsync = fsync
    os.kill(os.getpid(), signal.SIGSTOP)
    fsync(handle)
"""


def test_a_beginning_that_sleeps_in_its_fsync_shares_its_number_with_nobody(run):
    program = f"""{SLOW_DISK}
once = os.link
def then_slow(*paths, **folders):
    once(*paths, **folders)
    os.link, os.fsync = once, slow
os.link = then_slow
number = Attempts(run).begin(Attempt(host="slow"))
print(number)
try:
    Attempts(run).check_fence(number)
except Replaced as error:
    print(error.what)
"""
    with children(run, program) as [child]:
        await_stopped(child)
        begin = time.monotonic()
        assert Attempts(run).begin(Attempt(host="fast")) == 2
        assert time.monotonic() - begin < 30, "nobody waits for a disk of somebody else"
        child.send_signal(signal.SIGCONT)
        number, why = child.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert number == "1" and why.endswith("has been replaced by attempt 2")
    Attempts(run).check_fence(2)
    assert Attempts(run).info()["fence"] == 2
    assert [(attempt.number, attempt.host) for attempt in Attempts(run).all()] == [(1, "slow"), (2, "fast")]


def test_an_end_that_sleeps_in_its_fsync_takes_nothing_back(run):
    Attempts(run).begin(Attempt(host="slow"))
    program = f"""{SLOW_DISK}
once = os.replace
def then_slow(*paths, **folders):
    once(*paths, **folders)
    os.replace, os.fsync = once, slow
os.replace = then_slow
Attempts(run).amend(1, failed_with(Code.KILLED, "late", ""))
"""
    with children(run, program) as [child]:
        await_stopped(child)  # its own file is written; it has put run.json together, and writes it
        assert Attempts(run).begin(Attempt(host="fast")) == 2
        Attempts(run).update(reducer={"ranks": 2})
        child.send_signal(signal.SIGCONT)
        child.communicate(timeout=PATIENCE_S)
    info = Attempts(run).info()
    assert (info["fence"], info["reducer"]) == (2, {"ranks": 2})
    assert [(attempt.host, attempt.verdict and attempt.verdict.reason) for attempt in Attempts(run).all()] == [
        ("slow", "late"),
        ("fast", None),
    ]
    with pytest.raises(Replaced):
        Attempts(run).check_fence(1)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"attempt": 3, "run": []}'])
def test_a_number_whose_file_was_torn_counts_all_the_same(run, content):
    Attempts(run).begin(Attempt(host="n1"))
    Attempts(run).ids.path(2).write_text(content)
    assert Attempts(run).begin() == 3
    assert [attempt.number for attempt in Attempts(run).all()] == [1, 2, 3]


def test_a_copied_folder_is_another_run_and_a_moved_one_is_not(run, tmp_path):
    Attempts(run).begin(Attempt())
    identity = Attempts(run).info()["id"]
    moved = RunDir(run.path.rename(tmp_path / "moved"))
    assert Attempts(moved).begin() == 2 and Attempts(moved).info()["id"] == identity
    copy = RunDir(shutil.copytree(moved.path, tmp_path / "copy"))
    assert Attempts(copy).begin() == 3
    own = Attempts(copy).info()
    assert own["id"] != identity and own["path"] == str(copy.path)
    assert Attempts(copy).begin() == 4 and Attempts(copy).info()["id"] == own["id"], "it has its ID from then on"
    assert Attempts(moved).begin() == 3 and Attempts(moved).info()["id"] == identity


def test_a_run_json_that_was_removed_is_written_again(run):
    Attempts(run).begin(Attempt(host="n1"))
    identity = Attempts(run).info()["id"]
    run.run_json.unlink()
    assert Attempts(run).begin() == 2
    assert Attempts(run).all()[0].host == "n1" and Attempts(run).info()["id"] == identity


def test_a_fence_that_cannot_be_seen_is_none_that_is_lost(run):
    Attempts(run).begin()
    Attempts(run).ids.path(1).unlink()
    Attempts(run).ids.folder.rmdir()
    Attempts(run).ids.folder.touch()
    with pytest.raises(NotADirectoryError):
        Attempts(run).check_fence(1)
    hook = StopRequests(StopSignals(), run, print)
    hook.before_fit(SimpleNamespace(world=alone()))  # type: ignore[arg-type]
    assert not hook.vote().stop


# The lock


@pytest.mark.slow
def test_of_all_who_want_the_lock_of_a_dead_holder_one_gets_it_each_time(run):
    program = """
for _ in range(250):
    lock = LiveLock(run, dataclasses.replace(myself(), birth=1.0))  # dead as soon as it is there
    lock.acquire()
    print(lock.number)
"""
    numbers = outputs(run, program, 4)
    assert len(set(numbers)) == len(numbers) == 1000


@pytest.mark.slow
def test_no_two_live_processes_hold_the_lock(run):
    program = """
inside, rounds = run.path / "inside", 0
while rounds < 60:
    lock = LiveLock(run, myself())
    try:
        lock.acquire()
    except UserError:
        continue
    assert create_exclusively(inside, b""), "another one is inside"
    lock.check()
    inside.unlink()
    lock.release()
    rounds += 1
"""
    assert outputs(run, program, 4) == []
    assert not run.lock_file.exists()


def test_a_process_that_sleeps_while_it_takes_the_lock_does_not_have_it(run):
    program = """
def no_links(*_, **__):
    raise PermissionError(errno.EPERM, "not on this file system")
def slow(path, *given, once=os.open, **options):
    handle = once(path, *given, **options)
    if path == "1.json":
        os.open = once
        os.kill(os.getpid(), signal.SIGSTOP)
    return handle
os.link, os.open = no_links, slow
try:
    LiveLock(run, myself()).acquire()
except UserError as error:
    print(error.what)
"""
    with children(run, program) as [child]:
        await_stopped(child)  # its ticket is there, without its name
        new = take_over(run)
        child.send_signal(signal.SIGCONT)
        assert "in use by another live run: process" in child.communicate(timeout=PATIENCE_S)[0]
    new.check()
    assert read(run.lock_file) == new.holder
    new.release()


def test_a_holder_that_was_replaced_neither_beats_nor_unlocks(run, monkeypatch):
    old = LiveLock(run, myself())
    old.acquire()
    new = take_over(run)
    os.utime(run.lock_file, (2.0, 2.0))
    monkeypatch.setattr(live_lock, "BEAT_S", 0.0)
    with pytest.raises(Replaced, match=f"{run.path} has been taken over by process {os.getpid()} on n9"):
        old.beat()
    old.release()
    assert (run.lock_file.stat().st_mtime, read(run.lock_file)) == (2.0, new.holder)
    new.check()
    new.beat()
    assert run.lock_file.stat().st_mtime > 2.0
    new.release()
    assert at_work(run) is None and not run.lock_file.exists()


def test_a_holder_names_itself_again_where_a_late_one_has_taken_its_place(run, monkeypatch):
    lock = LiveLock(run, myself())
    lock.acquire()
    monkeypatch.setattr(live_lock, "BEAT_S", 0.0)
    for spoil in (run.lock_file.unlink, lambda: run.lock_file.write_text("{}")):
        spoil()
        with pytest.raises(UserError, match="in use"):
            LiveLock(run, myself()).acquire()
        lock.beat()
        assert read(run.lock_file) == lock.holder


def test_signs_of_life_from_a_thread_end_with_the_lock(run, monkeypatch):
    monkeypatch.setattr(live_lock, "BEAT_S", 0.02)
    old, threads = LiveLock(run, myself()), threading.active_count()
    old.acquire()
    with old.kept():
        assert threading.active_count() == threads + 1
        new = take_over(run)
        os.utime(run.lock_file, (2.0, 2.0))
        wait_for("end of the thread", lambda: threading.active_count() == threads)
        with pytest.raises(Replaced):
            old.check()
    assert run.lock_file.stat().st_mtime == 2.0
    new.release()


def test_a_file_server_that_does_not_answer_takes_no_lock_away(run, monkeypatch):
    def refused(*_):
        raise OSError(5, "Input/output error")

    lock = LiveLock(run, myself())
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(live_lock, "BEAT_S", 0.0)
        patch.setattr(os, "listdir", refused)
        lock.beat()
    lock.check()
    lock.release()


def test_locks_for_different_purposes_do_not_exclude_each_other(run):
    submission = LiveLock(run, myself(), TO_SUBMIT)
    with LiveLock(run, myself()).held(), submission.held():
        with pytest.raises(UserError, match="is being submitted at this moment: process"):
            LiveLock(run, myself(), TO_SUBMIT).acquire()
        submission.check()
    assert not list(run.path.glob("*.lock"))


# Those who are replaced


SUPERVISOR = """
from hpctrain.run import live_lock
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.supervisor import supervise
live_lock.BEAT_S = 0.1
verdict = supervise(run, lambda number: Launch(["sleep", "600"], {}, 1, saves=False), Limits(), Attempt())
print(json.dumps(verdict.to_json()))
"""


@pytest.mark.parametrize("asleep", [False, True])
def test_a_supervisor_that_was_replaced_ends_its_ranks_and_touches_nothing(run, asleep):
    with children(run, SUPERVISOR) as [child]:
        wait_for("attempt", Attempts(run).all)
        wait_for("ranks", lambda: run.log("launcher", 1).exists())
        if asleep:
            child.send_signal(signal.SIGSTOP)
            await_stopped(child)
        new = take_over(run)
        assert Attempts(run).begin(Attempt(host="n9")) == 2
        child.send_signal(signal.SIGCONT)
        verdict = json.loads(child.communicate(timeout=PATIENCE_S)[0])
    assert (verdict["exit_code"], verdict["code"]) == (ExitCode.DO_NOT_REQUEUE, "in_use")
    assert "has been taken over by" in verdict["reason"]
    new.check()
    assert read(run.lock_file) == new.holder
    assert Attempts(run).info()["fence"] == 2 and Attempts(run).all()[1].verdict is None
    assert Attempts(run).info()["attempts"][0]["verdict"] == verdict
    new.release()


def test_nothing_is_started_that_was_replaced_while_it_was_prepared(run, tmp_path):
    newer = []

    def prepare(number):
        newer.append(take_over(run))
        return Launch(["touch", str(tmp_path / "started")], {}, 1, saves=False)

    verdict = supervise(run, prepare, Limits(), Attempt())
    assert (verdict.exit_code, verdict.code) == (ExitCode.DO_NOT_REQUEUE, Code.IN_USE)
    assert not (tmp_path / "started").exists()
    newer[0].check()
    newer[0].release()


def test_ranks_end_at_a_step_boundary_where_a_newer_attempt_has_begun(run):
    Attempts(run).begin()
    trainer: Any = SimpleNamespace(world=alone(), state=SimpleNamespace(step=3))
    hook = StopRequests(StopSignals(), run, print)
    hook.before_fit(trainer)
    result: Any = None
    assert hook.after_step(trainer, result) is None
    Attempts(run).begin()
    assert hook.after_step(trainer, result) is None, "the fence is looked at now and then only"
    hook.next_look_at_fence = 0.0
    with pytest.raises(Replaced, match="has been replaced by a newer one"):
        hook.after_step(trainer, result)


def test_a_plain_command_is_ended_where_a_newer_attempt_has_begun(run):
    Attempts(run).begin()
    words = [sys.executable, "-m", "hpctrain.programs.plain_command", "bash", "-c", "echo $$; exec sleep 600"]
    environment = {**os.environ, RUN_DIR: str(run.path), ATTEMPT: "1"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        program = int(rank.stdout.readline())
        Attempts(run).begin()
        try:
            assert rank.wait(PATIENCE_S) == ExitCode.DO_NOT_REQUEUE
        finally:
            rank.kill()  # and with it the program
    assert not Path(f"/proc/{program}").exists()
    [word] = [json.loads(path.read_text()) for path in (run.ranks / "1").glob("*.json")]
    assert (word["ending"], word["exit_code"], word["error"]["type"]) == ("failed", 76, "Replaced")


# Submitting


SBATCH = """\
echo $$ >> {folder}/calls
until [ -e {folder}/gate ]; do sleep 0.02; done
echo 71
"""
SQUEUE = """\
echo '71|71|N/A|PENDING|0:00|1:00|1:00||N/A|Resources'
"""


@pytest.fixture
def submit(tmp_path: Path, run: RunDir) -> Callable[[], subprocess.Popen[str]]:
    """Starts ``hpctrain submit`` where Slurm's commands are scripts, of which sbatch takes until there is a gate."""
    write_programs(tmp_path, sbatch=SBATCH.format(folder=tmp_path), squeue=SQUEUE.format(folder=tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(f'name: r\nrun_dir: {run.path}\nlaunch: {{command: ["true"]}}\n')
    words: Sequence[str] = [sys.executable, "-m", "hpctrain", "submit", str(file)]
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    pipe = subprocess.PIPE
    return lambda: subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_of_two_submits_at_once_one_wins_before_sbatch(submit, run, tmp_path):
    with submit() as first:
        wait_for("sbatch", (tmp_path / "calls").exists)
        with submit() as second:
            refused = second.communicate(timeout=60)[1]
        (tmp_path / "gate").touch()
        first.communicate(timeout=60)
    with submit() as third:
        known = third.communicate(timeout=60)[1]
    assert (first.returncode, second.returncode, third.returncode) == (0, 64, 64)
    assert "is being submitted at this moment: process" in refused and "job 71" in known
    assert len((tmp_path / "calls").read_text().split()) == 1
    assert not (run.path / "submit.lock").exists()


@pytest.mark.slow
def test_of_submits_that_start_together_one_calls_sbatch(submit, run, tmp_path):
    (tmp_path / "gate").touch()
    for _ in range(3):
        rivals = [submit() for _ in range(3)]
        for rival in rivals:
            rival.communicate(timeout=60)
        assert sorted(rival.returncode for rival in rivals) == [0, 64, 64]
        assert len((tmp_path / "calls").read_text().split()) == 1
        (tmp_path / "calls").unlink()
        (run.path / "jobs.jsonl").unlink()


def test_a_submit_that_was_killed_is_in_nobodys_way(submit, tmp_path):
    with submit() as first:
        wait_for("sbatch", (tmp_path / "calls").exists)
        first.kill()
        (tmp_path / "gate").touch()
        first.communicate(timeout=60)
    with submit() as second:
        said, problem = second.communicate(timeout=60)
    assert second.returncode == 0, problem
    assert "submitted job 71" in said


SLURM_JOB = """
from hpctrain.launch.engines.slurm import supervise
from hpctrain.run.verdict import replaced
supervise.supervise = lambda *_, **__: replaced(Replaced("taken over by job 8"))
sys.exit(supervise.supervise_job(sys.argv[2]))
"""


def test_a_job_that_was_replaced_leaves_the_queue_alone(tmp_path, run):
    """The next start of this very job may be the newer attempt, and the chain's next jobs may be to follow it."""
    names = ("sbatch", "scancel", "scontrol", "squeue")
    write_programs(tmp_path, **{name: f"echo {name} >> {tmp_path}/calls" for name in names})
    (tmp_path / "run.yaml").write_text(f'name: r\nrun_dir: {run.path}\nlaunch: {{command: ["true"]}}\n')
    (run.path / "jobs.jsonl").write_text("".join(f'{{"job": "{n}", "time": 0, "cwd": "/"}}\n' for n in (7, 8)))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = [sys.executable, "-c", PREAMBLE + SLURM_JOB, str(run.path), str(tmp_path / "run.yaml")]
    done = subprocess.run(words, env={**os.environ, **job}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.DO_NOT_REQUEUE, done.stderr
    assert "taken over by job 8" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_a_stop_folder_asks_once_and_does_not_prevent_the_next_start(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    run.stop_file.mkdir()
    assert Attempts(run).begin() == 1 and not run.stop_file.exists()
    (run.stop_file / "x").mkdir(parents=True)
    with pytest.raises(UserError, match="STOP is a folder that is not empty"):
        Attempts(run).begin()
    (run.stop_file / "x").rmdir()
    assert Attempts(run).begin() == 2

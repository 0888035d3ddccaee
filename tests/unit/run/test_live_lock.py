"""One live run a folder."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import time

import pytest

from hpctrain.errors import UserError
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import STALE_S, LiveLock, at_work, is_live, myself, read
from tests.support.command import wait_for

LOCKER = """
import sys
from pathlib import Path
from hpctrain.errors import UserError
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.folder import RunDir
try:
    LiveLock(RunDir(Path(sys.argv[1])), myself()).acquire()
except UserError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    return made


def write(run_dir: RunDir, age_s: float = 0.0, **fields) -> None:
    """The lock of another process."""
    run_dir.lock_file.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(myself(), **fields))))
    then = time.time() - age_s
    os.utime(run_dir.lock_file, (then, then))


def test_the_folder_of_a_live_process_is_refused_and_said_whose_it_is(run_dir):
    LiveLock(run_dir, myself()).acquire()
    with pytest.raises(UserError, match=f"in use by another live run: process {os.getpid()} on "):
        LiveLock(run_dir, myself()).acquire()


def test_a_released_folder_can_be_taken(run_dir):
    for _ in range(2):
        lock = LiveLock(run_dir, myself())
        lock.acquire()
        lock.release()
    assert not run_dir.lock_file.exists()


def test_the_lock_of_a_dead_process_is_taken_over(run_dir):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write(run_dir, pid=ended.pid)
    LiveLock(run_dir, myself()).acquire()
    assert read(run_dir.lock_file).pid == os.getpid()


def test_another_process_of_the_same_number_is_not_the_holder(run_dir):
    write(run_dir, birth=1.0)
    LiveLock(run_dir, myself()).acquire()


def test_a_holder_elsewhere_counts_as_dead_after_its_silence(run_dir):
    write(run_dir, machine="elsewhere", host="n7", age_s=STALE_S / 2)
    with pytest.raises(UserError, match="n7"):
        LiveLock(run_dir, myself()).acquire()
    write(run_dir, machine="elsewhere", age_s=STALE_S * 2)
    LiveLock(run_dir, myself()).acquire()


def test_a_requeued_job_need_not_wait_for_its_former_self():
    me = dataclasses.replace(myself(), job="7", restarts=2)
    former = dataclasses.replace(me, machine="elsewhere", restarts=1)
    assert not is_live(former, silence=0.0, me=me)
    assert is_live(dataclasses.replace(former, job="8"), silence=0.0, me=me)
    assert is_live(dataclasses.replace(former, restarts=2), silence=0.0, me=me)


def test_a_lock_torn_by_a_crash_is_taken_over(run_dir):
    run_dir.lock_file.write_text('{"host": "n')
    os.utime(run_dir.lock_file, (1.0, 1.0))
    me = myself()
    LiveLock(run_dir, me).acquire()
    assert read(run_dir.lock_file) == me


def test_somebody_elses_lock_is_not_released(run_dir):
    lock = LiveLock(run_dir, myself())
    lock.acquire()
    write(run_dir, host="n7")
    lock.release()
    assert read(run_dir.lock_file).host == "n7"


def test_signs_of_life_are_given_now_and_then(run_dir, monkeypatch):
    lock = LiveLock(run_dir, myself())
    lock.acquire()
    os.utime(run_dir.lock_file, (1.0, 1.0))
    lock.beat()
    assert run_dir.lock_file.stat().st_mtime == 1.0
    monkeypatch.setattr("hpctrain.run.live_lock.BEAT_S", 0.0)
    lock.beat()
    assert run_dir.lock_file.stat().st_mtime > 1.0


def test_a_holder_that_prepares_for_long_gives_signs_of_life(run_dir, monkeypatch):
    monkeypatch.setattr("hpctrain.run.live_lock.BEAT_S", 0.01)
    lock = LiveLock(run_dir, myself())
    lock.acquire()
    os.utime(run_dir.lock_file, (1.0, 1.0))
    with lock.kept():
        wait_for("sign of life", lambda: run_dir.lock_file.stat().st_mtime > 1.0)


def test_a_dead_holder_is_one_for_those_who_may_only_read_too(run_dir, monkeypatch):
    write(run_dir, age_s=STALE_S + 5, host="n7", machine="elsewhere")

    def refused(path):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.touch", refused)
    assert at_work(run_dir) is None


def test_of_many_processes_that_want_a_dead_holders_folder_one_gets_it(run_dir):
    write(run_dir, birth=1.0)
    words = [sys.executable, "-c", LOCKER, str(run_dir.path)]
    pipe = subprocess.PIPE
    rivals = [subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    answers = [rival.stdout.readline().strip() for rival in rivals]
    for rival in rivals:
        rival.communicate()
    assert sorted(answers) == ["refused", "refused", "refused", "taken"]


def test_a_process_of_another_user_that_proc_hides_lives_as_long_as_it_gives_signs_of_life(monkeypatch):
    def kill(pid, number):
        raise PermissionError(errno.EPERM, "it is another user's")

    monkeypatch.setattr(os, "kill", kill)
    hidden = dataclasses.replace(myself(), pid=2**22 + 1)
    assert is_live(hidden, 1.0, myself()) and not is_live(hidden, 2 * STALE_S, myself())
    mine = dataclasses.replace(hidden, pid=os.getpid(), birth=1.0)
    assert not is_live(mine, 1.0, myself()), "the number is of a process that is shown, and is another one's by now"

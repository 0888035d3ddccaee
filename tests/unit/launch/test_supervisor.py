"""What a supervisor does around an attempt."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.errors import Code, ExitCode, NoRequeue
from hpctrain.launch import attempt as attempts
from hpctrain.launch.attempt import Launch, Limits, WatchedAttempt
from hpctrain.launch.supervisor import supervise
from hpctrain.run import last_words
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import WordFile, first_word
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.stop_request import StopRequest
from hpctrain.run.verdict import Action
from hpctrain.system.signals import StopSignals

SUPERVISOR = """
import json, sys
from pathlib import Path
from hpctrain.launch import attempt, supervisor
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.folder import RunDir
attempt.END_GRACE_S = attempt.WORDS_EVERY_S = 0.05
saves, folder, *words = sys.argv[1:]
launch = attempt.Launch(words, {}, 2, saves=saves == "True")
verdict = supervisor.supervise(RunDir(Path(folder)), lambda number: launch, attempt.Limits(), Attempt())
print(json.dumps(verdict.to_json()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "action"), [(True, "requeue"), (False, "done")])
def test_ranks_of_ours_end_together_those_of_a_plain_program_need_not(tmp_path: Path, saves: bool, action: str) -> None:
    rank = f"{shlex.quote(sys.executable)} -m hpctrain.rank.plain_command"
    ranks = f"PMI_RANK=0 {rank} true & PMI_RANK=1 {rank} sleep 1; wait"
    words = [sys.executable, "-c", SUPERVISOR, str(saves), str(tmp_path / "run"), "bash", "-c", ranks]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["action"] == action, done.stdout


def test_a_rank_in_a_container_of_its_own_processes_is_not_taken_for_dead(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt = WatchedAttempt(Launch([], {}, 1), run, 1, LiveLock(run, myself()), StopSignals(), Limits())
    here = first_word(0)
    assert attempt.lives(here) and not attempt.lives(dataclasses.replace(here, birth=1.0))
    assert attempt.lives(dataclasses.replace(here, pid=2, birth=1.0, machine="another namespace"))


@pytest.mark.parametrize(
    ("said", "patience_s"), [("", 10), ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", 42)]
)
def test_srun_gets_the_time_that_it_takes_to_tell_a_lost_node(tmp_path: Path, said: str, patience_s: int) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.log("launcher", 1).write_text(said)
    attempt = WatchedAttempt(Launch([], {}, 2), run, 1, LiveLock(run, myself()), StopSignals(), Limits())
    dead = dataclasses.replace(first_word(0), birth=1.0)
    WordFile.of(run, 1, dead).begin(dead)
    for now in (0, patience_s):
        attempt.look_at_ranks(now)
        assert attempt.failure is None
    attempt.look_at_ranks(patience_s + 1)
    assert attempt.failure is not None and attempt.failure.cause == "killed"


@pytest.mark.parametrize(("own", "code"), [(None, Code.PREFLIGHT), (Code.READ_ONLY, Code.READ_ONLY)])
def test_what_prevents_the_start_is_the_verdict(tmp_path: Path, own: Code | None, code: Code) -> None:
    def make_launch(number: int) -> Launch:
        raise NoRequeue("scratch of n2 cannot be written", "exclude n2", own)

    run = RunDir(tmp_path / "run")
    verdict = supervise(run, make_launch, Limits(), Attempt(ranks=2))
    assert (verdict.action, verdict.exit_code, verdict.code) == (Action.FAIL, ExitCode.DO_NOT_REQUEUE, code)
    assert verdict.before_ranks and verdict.cause == "preflight"
    assert (verdict.reason, verdict.fix) == ("scratch of n2 cannot be written", "exclude n2")
    [attempt] = Attempts(run).all()
    words = last_words.read(run, 1)
    assert words is not None and attempt.verdict == words.verdict == verdict
    assert not run.lock_file.exists()


def test_what_prevents_the_start_is_said_though_the_folder_cannot_be_written(tmp_path: Path) -> None:
    def make_launch(number: int) -> Launch:
        (run.path / "ranks").rmdir()
        raise NoRequeue("scratch of n2 cannot be written", "exclude n2")

    run = RunDir(tmp_path / "run")
    assert supervise(run, make_launch, Limits(), Attempt()).reason == "scratch of n2 cannot be written"


def test_looks_at_very_many_ranks_take_little_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def slow(*_: object) -> list[object]:
        looks.append(time.monotonic())
        time.sleep(0.2)  # a thousand files on Lustre take longer
        return []

    monkeypatch.setattr(attempts.WordReader, "look", slow)
    supervise(RunDir(tmp_path), lambda number: Launch(["sleep", "3"], {}, 1), Limits(), Attempt())
    assert len(looks) == 1, "when it begins"


def test_ranks_that_save_after_a_stop_request_have_time_as_long_as_the_checkpoint_grows(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    attempt = WatchedAttempt(Launch([], {}, 1), run, 1, LiveLock(run, myself()), StopSignals(), Limits(stop_grace_s=60))
    partial = run.checkpoints / ".partial-step-000000009-token"
    partial.mkdir()
    attempt.begin_stop(0, StopRequest.of_signal(signal.SIGTERM))
    for now in (50, 100, 150):
        with open(partial / "shard-00000-of-00001.h5", "ab") as shard:
            shard.write(bytes(100))
        attempt.look_at_save(now)
        assert attempt.stop_deadline == now + 60
    attempt.look_at_save(190)
    assert attempt.stop_deadline == 210, "it has not grown"

"""Logs of a run: which there are, which shows the first error, and following one."""

from __future__ import annotations

import os
import time

import pytest

from hpctrain import cli
from hpctrain.errors import Code, ExitCode, UserError
from hpctrain.run import logs
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.verdict import Action, RunVerdict, failed_with


def test_logs_are_found_by_rank_and_attempt(tmp_path):
    run = RunDir(tmp_path)
    run.logs.mkdir()
    for name in (
        "7-1-0.out",
        "7-1-10.out",
        "7-1-2.out",
        "7-2-0.out",
        "7-2-launcher.out",
        "slurm-7.out",
        "12_3-1-0.out",
        "x.txt",
    ):
        (run.logs / name).write_text("")
    assert [(log.job, log.rank) for log in logs.find(run, attempt=1)] == [
        ("7", "job"), ("12_3", "0"), ("7", "0"), ("7", "2"), ("7", "10"),
    ]  # fmt: skip
    assert [log.path.name for log in logs.find(run)] == ["slurm-7.out", "7-2-0.out", "7-2-launcher.out"]
    assert [log.path.name for log in logs.find(run, rank="10")] == ["7-1-10.out"]


@pytest.mark.parametrize("which", [("--rank", "9"), ("--attempt", "9")])
def test_the_logs_that_there_are_are_named_if_the_wanted_one_is_none_of_them(which, tmp_path):
    run = RunDir(tmp_path)
    run.logs.mkdir()
    (run.path / "events.jsonl").touch()
    for name in ("local-1-0.out", "local-1-1.out", "local-1-launcher.out"):
        (run.logs / name).touch()
    with pytest.raises(UserError, match=r"holds no such log\n  fix: its last attempt has logs of 0, 1, launcher$"):
        cli.dispatch(["logs", str(tmp_path), *which])


def test_the_job_log_of_an_array_element_is_found_beside_the_elements(tmp_path):
    for name in ("logs/slurm-7_1.out", "logs/slurm-7_11.out", "1/logs/7-1-0.out"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = logs.find(RunDir(tmp_path / "1"))
    assert [(log.job, log.rank) for log in found] == [("7_1", "job"), ("7", "0")]


def test_the_first_error_is_that_of_the_log_that_fell_silent_first(tmp_path):
    run = RunDir(tmp_path)
    run.logs.mkdir()
    for name, text, when in (
        ("7-1-0.out", "fine\nRuntimeError: connection lost\n", 20),
        ("7-1-3.out", "fine\nTraceback (most recent call last):\nValueError: boom\n", 10),
        ("7-1-1.out", "fine\n", 5),
        ("slurm-7.out", "hpctrain: rank 3 failed\n", 1),
    ):
        (run.logs / name).write_text(text)
        os.utime(run.logs / name, (when, when))
    found = logs.first_error(run, logs.find(run))
    assert found is not None
    assert found[0].rank == "3" and found[1].startswith("Traceback") and "boom" in found[1]
    assert logs.first_error(run, logs.find(run, rank="1")) is None


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("hpctrain: attempt 1: 4 ranks on n[1-2] with srun", None),
        ("hpctrain: stopped by signal SIGUSR1 at step 9\n  fix: the same command resumes it\nhpctrain: requeued", None),
        ("hpctrain: attempt 1: 2 ranks\nhpctrain: no data\n  fix: give some", "hpctrain: no data"),
        ("hpctrain: n2 was lost\n  fix: the same command resumes it\n  logs: /r/logs", "hpctrain: n2 was lost"),
        ("hpctrain: rank 0 died\n  logs: /r/logs", "hpctrain: rank 0 died"),
        ("hpctrain: line 9 of the job script failed: false\n  fix: see above", "hpctrain: line 9"),
        ("hpctrain: stopped by USR1 at step 9\n  fix: the same command resumes it", "hpctrain: stopped by USR1"),
    ],
)
def test_what_the_supervisor_says_of_a_good_end_is_no_error(tmp_path, said, found):
    run = RunDir(tmp_path)
    run.create()
    attempts = Attempts(run)
    stopped = RunVerdict(Action.REQUEUE, ExitCode.STOPPED, "stopped by signal SIGUSR1 at step 9", code=Code.TIME_LIMIT)
    attempts.end(attempts.begin(Attempt(job="7")), stopped, [])
    attempts.end(attempts.begin(Attempt(job="7")), failed_with(Code.NODE, "n2 was lost", "resume it"), [])
    (run.logs / "slurm-7.out").write_text(f"{said}\n")
    error = logs.first_error(run, logs.find(run))
    assert error is None if found is None else error is not None and error[1].startswith(found)


def test_following_ends_with_the_job(tmp_path):
    path, states = tmp_path / "log", iter([False, False, True, True])
    path.write_text("one\n")
    assert "".join(logs.follow(path, lambda: next(states), pause_s=0, ask_s=0)) == "one\n"


def test_following_asks_slurm_seldom(tmp_path):
    asked: list[bool] = []

    def over():
        asked.append(len(asked) > 1)
        return asked[-1]

    begin = time.monotonic()
    assert list(logs.follow(tmp_path / "log", over, pause_s=0.001, ask_s=0.1)) == []
    assert len(asked) == 3 and time.monotonic() - begin >= 0.2


def test_logs_of_ranks_that_share_out_a_model_have_their_places(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    for plan in ({"tensor": 2}, {}):
        Attempts(run).begin(Attempt(ranks=4, **plan))
    for name in ("7-1-3.out", "7-1-9.out", "7-2-3.out", "slurm-7.out"):
        (run.logs / name).write_text("")
    found = [*logs.find(run, attempt=1), *logs.find(run, "3", attempt=2)]
    assert [log.path.name for log in found] == ["slurm-7.out", "7-1-3.out", "7-1-9.out", "7-2-3.out"]
    assert logs.places(run, found) == ["", " (data 1, tensor 1)", "", ""]


def test_logs_of_thousands_of_ranks_are_printed_one_by_one(tmp_path, monkeypatch, capsys):
    run, shown = RunDir(tmp_path), []
    run.create()
    (run.path / "events.jsonl").touch()
    for rank in range(3):
        (run.logs / f"local-1-{rank}.out").touch()
    monkeypatch.setattr(logs, "read", lambda path: shown.append(capsys.readouterr().out) or path.name)
    assert cli.dispatch(["logs", str(tmp_path)]) == ExitCode.DONE
    assert shown[0] == "" and "local-1-0.out" in shown[1] and "local-1-1.out" in shown[2], "one is in memory at a time"

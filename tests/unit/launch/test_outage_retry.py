"""File servers that do not answer for a moment."""

from __future__ import annotations

import dataclasses
import errno
import os
import time

import pytest

from hpctrain import errors
from hpctrain.errors import RunFailed
from hpctrain.launch.attempt import Launch, Limits, WatchedAttempt
from hpctrain.launch.supervisor import supervise
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, WordFile, first_word
from hpctrain.run.verdict import Action
from hpctrain.system import retry, safe_read
from tests.support.faults import FileServer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were made; none takes time."""
    pauses: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", pauses.append)
    return pauses


def test_a_file_server_that_is_away_is_asked_again_until_patience_ends(asked):
    answers: list[Exception | str] = [OSError(errno.EIO, "EIO"), OSError(errno.ESTALE, "ESTALE"), "content"]

    def read():
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    assert retry.retry_or_fail(read) == "content" and asked == list(retry.FILE_PAUSES_S[:2])
    answers[:] = [errors.refusal(OSError(errno.EIO, "EIO"), "run.yaml cannot be read", "see"), "content"]
    answers[0].__cause__ = OSError(errno.EIO, "EIO")
    assert retry.retry_or_fail(read) == "content", "who raised it has not waited"
    asked.clear()
    answers[:] = [OSError(errno.EIO, os.strerror(errno.EIO), "run.json")] * 9
    with pytest.raises(RunFailed, match=r"run\.json cannot be used: Input/output error"):
        retry.retry_or_fail(lambda: retry.retry_files(read))
    assert len(asked) == len(retry.FILE_PAUSES_S), "one of the two waits"


def test_other_errors_are_not_waited_for(asked):
    def read():
        raise PermissionError(errno.EACCES, "no", "run.json")

    with pytest.raises(RunFailed, match=r"run\.json"):
        retry.retry_or_fail(read)
    assert not asked


def ended(run: RunDir, number: int) -> None:
    """Two ranks that have completed an attempt."""
    for rank in range(2):
        last = dataclasses.replace(first_word(rank), pid=1000 + rank, ending=Ending.COMPLETED, exit_code=0, step=4)
        WordFile.of(run, number, last).begin(dataclasses.replace(last, ended=time.time()))


@pytest.mark.parametrize(
    ("call", "where"),
    [
        *(("mkdir", name) for name in ("run", "logs")),
        *(("listdir", name) for name in ("locks/run", "attempts")),
        *(("scandir", name) for name in ("checkpoints", "ranks/1")),
        *(("open", name) for name in ("run.lock", "run.json", "attempts", "ranks/1/", "attempts/1.ended")),
        *(("replace", name) for name in (".run.lock", ".run.json", ".run.yaml", "ended", "ranks/.")),
        *(("unlink", name) for name in ("STOP", "attempts/.")),
    ],
)
def test_a_file_server_that_fails_once_costs_a_completed_run_nothing(tmp_path, monkeypatch, asked, call, where):
    run = RunDir(tmp_path / "run")
    server = FileServer(errno.ESTALE, where, call)

    def begun(number):
        left, server.left = server.left, 0
        ended(run, number)
        server.left = left
        return Launch(["true"], {}, 2)

    server.install(monkeypatch)
    verdict = supervise(run, begun, Limits(), Attempt(), run_yaml="name: r")
    assert server.failed == 1, "it was in the way"
    assert verdict.action is Action.DONE and Attempts(run).all()[-1].verdict == verdict
    assert run.run_yaml.read_text() == "name: r"


def test_a_file_server_that_stays_away_is_no_reason_to_forget_a_run(tmp_path, monkeypatch, asked):
    run = RunDir(tmp_path / "run")

    def begun(number):
        ended(run, number)
        FileServer(errno.EIO, "ranks/1", "scandir", 1000).install(monkeypatch)
        return Launch(["true"], {}, 2)

    verdict = supervise(run, begun, Limits(), Attempt())
    assert verdict.action is Action.REQUEUE and sum(pause for pause in asked if pause >= 0.5) < 60


def test_words_that_were_seen_count_if_the_file_server_then_stays_away(tmp_path, monkeypatch, asked):
    run = RunDir(tmp_path / "run")

    def watch(attempt, environment):
        ended(run, attempt.number)
        attempt.words.look()
        FileServer(errno.EKEYEXPIRED, "ranks/1", "scandir", 1000).install(monkeypatch)

    monkeypatch.setattr(WatchedAttempt, "watch", watch)
    assert supervise(run, lambda number: Launch(["true"], {}, 2), Limits(), Attempt()).action is Action.DONE


@pytest.mark.parametrize("errors", [1, 1000])
def test_run_json_that_cannot_be_read_when_the_ranks_end_costs_no_verdict(tmp_path, monkeypatch, asked, errors):
    run, left = RunDir(tmp_path / "run"), [0]
    read = safe_read.read

    def flaky(path, *more):
        if left[0] and path == run.run_json:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, *more)

    def begun(number):
        left[0] = errors
        return Launch(["true"], {}, 1)

    monkeypatch.setattr(safe_read, "read", flaky)
    monkeypatch.setattr("hpctrain.launch.attempt.WatchedAttempt.watch", lambda *_: None)
    verdict = supervise(run, begun, Limits(), Attempt())
    assert verdict.action is Action.REQUEUE
    left[0] = 0
    if errors == 1:
        assert Attempts(run).all()[-1].verdict == verdict

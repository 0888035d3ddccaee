"""File servers that do not answer for a moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpctrain.errors import RunFailed
from hpctrain.launch import outage_retry
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.supervisor import supervise
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord
from hpctrain.run.verdict import Action, RunVerdict
from hpctrain.system import safe_read


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were made; none takes time."""
    pauses: list[float] = []
    monkeypatch.setattr(outage_retry.time, "sleep", pauses.append)
    return pauses


def test_a_file_server_that_is_away_is_asked_again_until_patience_ends(asked: list[float]) -> None:
    answers: list[OSError | str] = [OSError(errno.EIO, "EIO"), OSError(errno.ESTALE, "ESTALE"), "content"]

    def read() -> str:
        if isinstance(answer := answers.pop(0), OSError):
            raise answer
        return answer

    assert outage_retry.read_patiently(read) == "content" and asked == list(outage_retry.FILE_PAUSES_S[:2])
    answers[:] = [OSError(errno.EIO, os.strerror(errno.EIO), "run.json")] * 9
    with pytest.raises(RunFailed, match=r"run\.json cannot be used: Input/output error"):
        outage_retry.read_patiently(read)
    assert len(asked) == 2 + len(outage_retry.FILE_PAUSES_S)


def test_other_errors_are_not_waited_for(asked: list[float]) -> None:
    def read() -> None:
        raise PermissionError(errno.EACCES, "no", "run.json")

    with pytest.raises(RunFailed, match=r"run\.json"):
        outage_retry.read_patiently(read)
    assert not asked


@pytest.mark.parametrize("errors", [1, 1000])
def test_run_json_that_cannot_be_read_when_the_ranks_end_costs_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[float], errors: int
) -> None:
    run, left = RunDir(tmp_path / "run"), [0]
    read = safe_read.read

    def flaky(path: Path, *more: int) -> bytes:
        if left[0] and path == run.run_json:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, *more)

    def begun(number: int) -> Launch:
        left[0] = errors
        return Launch(["true"], {}, 1)

    monkeypatch.setattr(safe_read, "read", flaky)
    monkeypatch.setattr("hpctrain.launch.attempt.WatchedAttempt.watch", lambda *_: None)
    verdict = supervise(run, begun, Limits(), Attempt())
    assert verdict.action is Action.REQUEUE
    left[0] = 0
    if errors == 1:
        assert Attempts(run).all()[-1].verdict == verdict


def test_words_are_recorded_although_the_first_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[float]
) -> None:
    from hpctrain.launch import supervisor

    ends: list[int] = []

    def end(self: Attempts, number: int, verdict: RunVerdict, words: list[LastWord]) -> None:
        ends.append(number)
        if len(ends) == 1:
            raise RunFailed("cannot write", "see") from OSError(errno.EIO, "EIO")

    monkeypatch.setattr(Attempts, "end", end)
    supervisor.record(RunDir(tmp_path), 3, RunVerdict(Action.DONE, supervisor.ExitCode.DONE, "done"), [])
    assert ends == [3, 3]

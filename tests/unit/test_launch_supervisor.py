"""What a supervisor does around an attempt."""

from __future__ import annotations

from pathlib import Path

from hpctrain.errors import ExitCode, NoRequeue
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.supervisor import supervise
from hpctrain.launch.verdict import PREFLIGHT, Action
from hpctrain.run_dir import RunDir


def test_what_prevents_the_start_is_the_verdict(tmp_path: Path) -> None:
    def make_launch(number: int) -> Launch:
        raise NoRequeue("scratch of n2 cannot be written", "exclude n2")

    run = RunDir(tmp_path / "run")
    verdict = supervise(run, make_launch, Limits(), {"ranks": 2})
    assert (verdict.action, verdict.exit_code, verdict.cause) == (Action.FAIL, ExitCode.DO_NOT_REQUEUE, PREFLIGHT)
    assert (verdict.reason, verdict.fix) == ("scratch of n2 cannot be written", "exclude n2")
    [attempt] = run.attempts()
    assert attempt["verdict"] == run.read_words(1)["verdict"] == verdict.to_json()
    assert not run.lock_file.exists()


def test_what_prevents_the_start_is_said_though_the_folder_cannot_be_written(tmp_path: Path) -> None:
    def make_launch(number: int) -> Launch:
        (run.path / "ranks").rmdir()
        raise NoRequeue("scratch of n2 cannot be written", "exclude n2")

    run = RunDir(tmp_path / "run")
    assert supervise(run, make_launch, Limits(), {}).reason == "scratch of n2 cannot be written"

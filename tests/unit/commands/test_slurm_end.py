"""Whom ``hpctrain stop`` asks, and whom it cancels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.launch.engines.slurm import client, submission
from hpctrain.run.folder import RunDir
from hpctrain.run.job import QueueEntry
from hpctrain.run.live_lock import LiveLock, myself


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with one running and one waiting job."""
    entries = [QueueEntry(*each, "", "", "", "", "", "") for each in (("7", "RUNNING"), ("8", "PENDING"))]
    monkeypatch.setattr(client, "find", lambda name: name)
    monkeypatch.setattr(submission, "alive", lambda run: entries)
    return RunDir(tmp_path)


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that were cancelled."""
    found: list[str] = []

    def cancel(ids: Sequence[str]) -> None:
        found.extend(ids)

    monkeypatch.setattr(client, "cancel", cancel)
    return found


def test_a_job_at_work_is_asked(run: RunDir, cancelled: list[str]) -> None:
    lock = LiveLock(run, dataclasses.replace(myself(), job="7"))
    lock.acquire()
    assert main(["stop", str(run.path)]) == 0
    assert cancelled == ["8"] and run.stop_requested_by() is not None


def test_a_job_whose_attempt_has_not_begun_does_not_begin_it(run: RunDir, cancelled: list[str]) -> None:
    assert main(["stop", str(run.path)]) == 0
    assert cancelled == ["7", "8"]


def test_a_run_in_an_interactive_allocation_is_asked(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    LiveLock(run, dataclasses.replace(myself(), job="99")).acquire()
    assert main(["stop", str(run.path)]) == 0
    assert run.stop_requested_by() is not None


def test_a_run_without_a_job_is_asked(run: RunDir, cancelled: list[str]) -> None:
    LiveLock(run, dataclasses.replace(myself(), job=None)).acquire()
    assert main(["stop", str(run.path)]) == 0
    assert not cancelled and run.stop_requested_by() is not None

"""Who died first, from what agents noted."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from hpctrain.errors import Code, ExitCode
from hpctrain.launch.launcher_messages import Death
from hpctrain.launch.postmortem import complete, died_first, missing_ranks
from hpctrain.run import deaths
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, LastWord
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR


def test_the_first_death_is_the_cause_unless_an_error_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(ATTEMPT, "2")
    assert died_first(run, 2) == []
    deaths.note(3)
    deaths.note(1)
    assert died_first(run, 2) == [3]
    assert died_first(run, 1) == [], "another attempt's"
    before = LastWord(0, "n1", 1, 0.0, 0.0, ending=Ending.FAILED, ended=1.0)
    assert died_first(run, 2, [before]) == []


def test_what_was_found_out_of_a_rank_is_in_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    running = LastWord(1, socket.gethostname(), 7, 0.0, 0.0)
    killed = complete(running, [Death(1, signal=9)], [running])
    assert (killed.ending, killed.code, killed.exit_code) == (Ending.KILLED, Code.KILLED, 137)
    monkeypatch.setattr("hpctrain.launch.postmortem.ran_out_of_memory", lambda word: True)
    assert complete(running, [Death(1, signal=9)], [running]).code is Code.OUT_OF_MEMORY
    assert complete(running, [Death(1, signal=11)], [running]).code is Code.KILLED
    elsewhere = dataclasses.replace(running, host="n9")
    assert complete(elsewhere, [Death(1, signal=9)], [running]).code is Code.KILLED, "its kernel cannot be asked"


SRUN = "srun: error: task 2 launch failed: Unspecified error\nsrun: error: n1: tasks 0-1: Killed\n"


@pytest.mark.parametrize(("hosts", "host", "where"), [({2: "n2"}, "n2", " on n2"), ({}, None, "")])
def test_ranks_that_slurm_could_not_start_are_the_nodes_fault(
    tmp_path: Path, hosts: dict[int, str], host: str | None, where: str
) -> None:
    verdict = missing_ranks([], 4, SRUN, "", tmp_path / "log", hosts)
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.code) == (2, host, Code.NODE)
    assert verdict.reason == f"rank 2 could not be started{where}: Slurm says 'Unspecified error'"


def test_a_lost_node_is_the_cause_of_what_other_ranks_report(tmp_path: Path) -> None:
    text = "srun: error: n1: tasks 0-1: Killed\nsrun: error: Timed out waiting for job step to complete\n"
    words = [LastWord(rank, host, 1, 0.0, 0.0) for rank, host in enumerate(("n1", "n1", "n2", "n2"))]
    verdict = missing_ranks(words, 4, text, "", tmp_path / "log", {})
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.code) == (2, "n2", Code.NODE)
    assert "n2 was lost" in verdict.reason and "ranks 2, 3" in verdict.reason


def test_the_runs_own_mistake_is_not_hidden_by_a_lost_node(tmp_path: Path) -> None:
    failed = LastWord(0, "n1", 1, 0.0, 0.0, ending=Ending.FAILED, ended=1.0, exit_code=ExitCode.USER_ERROR)
    text = "PRTE has lost communication with a remote daemon.\n"
    assert missing_ranks([failed], 2, text, "", tmp_path / "log", {}) is None
    lost = missing_ranks([], 2, text, "", tmp_path / "log", {})
    assert lost is not None and lost.code is Code.NODE


def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / "deaths-1.txt").write_text("12.5 4\n11.0 2\n13.")
    assert deaths.noted(run, 1) == [(11.0, 2), (12.5, 4)]

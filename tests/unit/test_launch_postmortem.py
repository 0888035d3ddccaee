"""Who died first, from what agents noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch.last_words import Ending, LastWord
from hpctrain.launch.postmortem import died_first
from hpctrain.monitor import deaths
from hpctrain.run_dir import ATTEMPT, RUN_DIR, RunDir


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


def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / "deaths-1.txt").write_text("12.5 4\n11.0 2\n13.")
    assert deaths.noted(run, 1) == [(11.0, 2), (12.5, 4)]

"""``hpctrain init``: what it writes, and that each starter runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.commands.init import FRAMEWORKS, KINDS
from hpctrain.config.loading import load
from tests.support.command import events, hpctrain

KINDS_OF_PROGRAM = [(framework, kind) for framework in FRAMEWORKS for kind in KINDS]


@pytest.mark.parametrize(("framework", "kind"), KINDS_OF_PROGRAM)
def test_a_task_and_a_run_file(framework: str, kind: str, tmp_path: Path) -> None:
    words = ["init", "first", "--framework", framework, "--kind", kind, "--folder", str(tmp_path / "new")]
    assert main(words) == 0
    assert load(tmp_path / "new/first.yaml").task == "first.py:task"
    compile((tmp_path / "new/first.py").read_text(), "first.py", "exec")


def test_files_that_are_there_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "first.yaml").write_text("mine")
    assert main(["init", "first", "--folder", str(tmp_path)]) == 64
    assert "first.yaml exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["first.yaml"]
    assert main(["init", "../first", "--folder", str(tmp_path)]) == 64
    assert "beginning with a letter" in capsys.readouterr().err


def test_the_next_commands_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "first"]) == 0
    assert "\n  hpctrain run -n 2 first.yaml " in capsys.readouterr().out
    assert main(["init", "first", "--folder", "a b"]) == 0
    assert "\n  cd 'a b'; hpctrain doctor first.yaml " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "kind"), KINDS_OF_PROGRAM)
def test_starters_learn_what_they_are_made_to(framework: str, kind: str, tmp_path: Path) -> None:
    hpctrain("init", "first", "--framework", framework, "--kind", kind, cwd=tmp_path)
    hpctrain("train", "first.yaml", cwd=tmp_path, timeout=250, warm=FRAMEWORKS[framework])
    metrics = events(tmp_path / "runs/first", "eval")[-1]["metrics"]
    assert metrics["error"] < 0.5 if "error" in metrics else metrics["accuracy"] > 0.9

"""``hpctrain init``: what it writes, and that each starter runs as it is."""

import pytest

from hpctrain.commands.init import FRAMEWORKS, KINDS
from hpctrain.config.loading import load
from tests.support.command import events, hpctrain

KINDS_OF_PROGRAM = [(framework, kind) for framework in FRAMEWORKS for kind in KINDS]


@pytest.mark.parametrize(("framework", "kind"), KINDS_OF_PROGRAM)
def test_a_task_and_a_run_file(framework, kind, tmp_path, cli):
    words = ["init", "first", "--framework", framework, "--kind", kind, "--folder", str(tmp_path / "new")]
    cli(*words)
    assert load(tmp_path / "new/first.yaml").task == "first.py:task"
    compile((tmp_path / "new/first.py").read_text(), "first.py", "exec")


def test_files_that_are_there_stay_as_they_are(tmp_path, cli):
    (tmp_path / "first.yaml").write_text("mine")
    assert "first.yaml exists already" in cli("init", "first", "--folder", tmp_path, code=64).err
    assert [path.name for path in tmp_path.iterdir()] == ["first.yaml"]
    assert "beginning with a letter" in cli("init", "../first", "--folder", tmp_path, code=64).err


@pytest.mark.parametrize("name", ["torch", "random", "numpy"])
def test_a_task_replaces_no_module(name, tmp_path, cli):
    assert f"{name} is the name of a Python module" in cli("init", name, "--folder", tmp_path, code=64).err


def test_the_next_commands_are_said(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "\n  hpctrain run -n 2 first.yaml " in cli("init", "first").out
    assert "\n  cd 'a b'; hpctrain doctor first.yaml " in cli("init", "first", "--folder", "a b").out


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "kind"), KINDS_OF_PROGRAM)
def test_starters_learn_what_they_are_made_to(framework, kind, tmp_path):
    hpctrain("init", "first", "--framework", framework, "--kind", kind, cwd=tmp_path)
    hpctrain("train", "first.yaml", cwd=tmp_path, timeout=250, warm=FRAMEWORKS[framework])
    metrics = events(tmp_path / "runs/first", "eval")[-1]["metrics"]
    assert metrics["error"] < 0.5 if "error" in metrics else metrics["accuracy"] > 0.9

"""The tutorial works from its first command to its last, in a new folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tutorial
from tests.support.command import PROJECT, environment, events, hpctrain, ranks_of, reaches_step, started, wait_for
from tests.support.mpi import PATIENCE_S

SHORTER = {"bench": ["--steps", "12", "--rounds", "1"], "watch": ["--once"]}
"""Options added to commands that would take minutes or need a terminal."""


@pytest.mark.world_size(2)
@pytest.mark.timeout(900)
def test_every_step_of_the_tutorial(tmp_path):
    assert set(tutorial.write_files(tmp_path)) == {"measure.py", "bearings.py", "bearings.yaml", "train.py"}
    run = tmp_path / "runs" / "bearings"
    first, *todo = tutorial.commands()
    assert first[0] == "mkdir"
    codes = []
    while todo:
        program, *words = todo.pop(0)
        if program == "python":
            subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment(), check=True, timeout=200)
        elif words[:3] == ["run", "-n", "2"] and todo[0][1] == "watch":
            codes.append(interrupted(words, [todo.pop(0)[1:], todo.pop(0)[1:]], tmp_path, run))
        else:
            assert program == "hpctrain"
            hpctrain(*words, *SHORTER.get(words[0], []), cwd=tmp_path, timeout=300, warm="torch")
    assert codes == [75]
    assert events(run, "resumed") and events(run, "run_finished")[-1]["reason"] == "completed"
    assert events(run, "eval")[-1]["metrics"]["accuracy"] > 0.85
    assert (run / "report.html").exists() and (run / "predictions.h5").exists()
    assert (tmp_path / "bearings.safetensors").exists()
    assert json.loads((tmp_path / "runs/bearings-scaling/scaling.json").read_text())
    assert events(tmp_path / "runs/longer", "run_finished")[-1]["reason"] == "completed"


def interrupted(words: list[str], meanwhile: list[list[str]], folder: Path, run: Path) -> int:
    """Run a command, and others while it waits between two training steps; return its exit code."""
    with started(*words, cwd=folder) as child:
        wait_for("steps", reaches_step(run, 100))
        ranks = ranks_of(child.pid)
        for rank in ranks:
            rank.suspend()
        for other in meanwhile:
            hpctrain(*other, *SHORTER.get(other[0], []), cwd=folder)
        for rank in ranks:
            rank.resume()
        return child.wait(PATIENCE_S)


def test_the_site_fails_on_what_leads_nowhere_and_on_what_is_undocumented(tmp_path):
    """Built as by ``make docs``, with the pages concerned, to be quick."""
    (pages := tmp_path / "docs").mkdir()
    for name in ("conf.py", "index.md", "tasks.md", "data.md", "api/ranks.md"):
        (pages / name).parent.mkdir(exist_ok=True)
        shutil.copy(PROJECT / "docs" / name, pages / name)
    change(
        pages / "tasks.md",
        "# Writing a task",
        "# Writing a task\n\n[gone](gone.md), [no such part](data.md#no-such-part)",
    )
    change(pages / "api/ranks.md", ".. autofunction:: hpctrain.connect\n", "")
    change(pages / "conf.py", 'project = "hpctrain"', 'hpctrain.load_config.__doc__ = None\nproject = "hpctrain"')
    recipe = re.search(r"^docs: .*\n\t.*sphinx-build (.*) docs build/docs$", (PROJECT / "Makefile").read_text(), re.M)
    assert recipe
    command = [sys.executable, "-m", "sphinx", *recipe.group(1).split(), str(pages), str(tmp_path / "site")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode != 0
    for problem in (
        "gone.md",
        "no-such-part",
        "hpctrain.connect is public but on no page",
        "hpctrain.load_config: it has no docstring",
    ):
        assert problem in done.stderr, done.stderr
    assert "hpctrain.World is public" not in done.stderr, "it is on a page"


def change(path: Path, before: str, after: str) -> None:
    """Change a page."""
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.parametrize("picture", ["watch.svg", "report.png", "heat.png"])
def test_pictures_are_small_and_fetch_nothing(picture):
    content = (PROJECT / "docs" / "pictures" / picture).read_bytes()
    assert 1000 < len(content) < 150_000
    assert not re.search(rb"(url\(|src=|href=)[\"']?https?:", content)

"""Each way that a rank ends a run: exit code, what is said and explained, and what it leaves behind."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hpctrain.run.attempts import Attempts
from hpctrain.run.events import KINDS
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import read as read_words
from hpctrain.run.run_view import RunView
from tests.support.command import (
    assert_explained,
    endings,
    events,
    hpctrain,
    last_words,
    leftovers,
    misbehaving_run,
    refused,
)
from tests.support.mpi import Result

pytestmark = pytest.mark.world_size(2)


class Ended(NamedTuple):
    """A finished run of two ranks."""

    run: Path
    """The run folder; tests must only read it."""
    said: Result


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """`ended(mode)`: a run of programs/launch_task.py whose rank 1 misbehaves in this mode; by default none does."""

    @functools.cache
    def run(mode: str) -> Ended:
        folder = tmp_path_factory.mktemp(mode or "well-behaved")
        said = hpctrain("run", "-n", 2, misbehaving_run(folder, mode), code=None, warm="torch")
        return Ended(folder / "run", said)

    return run


@pytest.mark.tour
def test_two_ranks_train_as_one_job(ended):
    run, said = ended("")
    assert (said.returncode, said.stderr) == (0, "")
    assert "2 ranks on " in said.stdout
    saved = read_words(RunDir(run), 1)
    assert saved is not None and saved.verdict is not None
    assert [word.ending.value for word in saved.ranks] == ["completed", "completed"]
    assert len({word.weights_hash for word in saved.ranks}) == 1
    assert (saved.verdict.action.value, saved.verdict.code.value) == ("done", "completed")
    kinds = {event.name for event in RunView(run).events()}
    assert {"run_started", "train", "run_finished"} <= kinds <= KINDS.keys()
    (begin,) = events(run, "run_started")
    assert (begin["ranks"], begin["reducer"], begin["framework"]) == (2, "mpi", "torch")
    (end,) = events(run, "run_finished")
    assert (end["reason"], end["step"], end["steps"]) == ("completed", 12, 12)
    assert not leftovers(run.parent)
    assert_explained(run, "completed")


def test_the_run_folder_says_what_ran(ended):
    run_dir = RunDir(ended("").run)
    info = Attempts(run_dir).info()
    (attempt,) = info["attempts"]
    assert (info["fence"], attempt["ranks"], attempt["verdict"]["exit_code"]) == (1, 2, 0)
    assert attempt["to_step"] == 12
    assert {"python", "hpctrain", "torch", "mpi4py"} <= attempt["versions"].keys()
    assert run_dir.run_yaml.exists()
    assert not run_dir.lock_file.exists()
    assert {path.name for path in run_dir.logs.iterdir()} >= {"local-1-0.out", "local-1-1.out", "local-1-launcher.out"}


@pytest.mark.parametrize(
    ("mode", "code", "parts", "left", "cause", "explained"),
    [
        ("nan", 76, ["not finite", "step 4", "rank 1", "samples"], ["failed"] * 2, "nan", ["step 4", "samples"]),
        ("raise", 70, ["ValueError: bad sample"], ["taken_down", "failed"], "exception", ["bad sample", "launch_task"]),
        pytest.param(
            "raise-in-task", 70, ["this rank has no luck", "launch_task.py:"], ["taken_down", "failed"], "exception",
            ["no luck"], marks=pytest.mark.tour,
        ),
        ("kill", 70, [], ["taken_down", "killed"], "killed", ["SIGKILL"]),
        ("sys-exit", 64, [], None, "exception", ["sys.exit"]),
        ("exit", 70, [], None, "vanished", []),
    ],
)  # fmt: skip
def test_a_rank_that_fails_takes_the_others_down_and_is_named(
    ended, mode, code, parts, left, cause,
    explained,
) :  # fmt: skip
    run, said = ended(mode)
    if parts:
        refused(said, code, "rank 1", *parts)
    assert said.returncode == code, said.output
    assert "rank 1" in said.stderr
    assert left in (None, endings(run))
    if mode == "raise":
        assert "in __call__" in last_words(run)[1]["error"]["traceback"]
    assert not leftovers(run.parent)
    assert_explained(run, cause, "rank 1", *explained)


def test_what_is_not_known_is_said_to_be_unknown(ended, tmp_path):
    run = shutil.copytree(ended("kill").run, tmp_path / "run")
    shutil.rmtree(run / "ranks")
    (run / "run.json").unlink()
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    old = [json.dumps(line | {"time": line["time"] - 120}) for line in lines]  # recent ones may belong to a live run
    (run / "events.jsonl").write_text("".join(f"{line}\n" for line in old))
    assert_explained(run, "unknown")

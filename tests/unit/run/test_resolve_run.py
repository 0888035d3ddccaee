"""One place says which run is meant, for all commands alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpctrain.checkpoint.mirror import locate_checkpoint
from hpctrain.errors import UserError
from hpctrain.run import resolve_run
from hpctrain.run.folder import RunDir

RUN_FILE = "name: wave\ntask: 'x.py:task'\ntrain: {steps: 1, global_batch: 1}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with one checkpoint, and the run file that names it."""
    run = RunDir(tmp_path / "wave")
    run.create()
    (tmp_path / "wave.yaml").write_text(f"{RUN_FILE}run_dir: {run.path}\n")
    run.run_yaml.write_text(f"{RUN_FILE}run_dir: {run.path}\n")
    (run.checkpoints / "step-000000010").mkdir()
    return run


@pytest.fixture
def array(tmp_path: Path) -> Path:
    for index in (0, 1, 10):
        (tmp_path / "sweep" / str(index)).mkdir(parents=True)
        (tmp_path / "sweep" / str(index) / "run.yaml").write_text(RUN_FILE)
    return tmp_path / "sweep"


@pytest.mark.parametrize(
    "typed", ["wave", "wave.yaml", "wave/run.yaml", "wave/", "wave/checkpoints", "wave/checkpoints/step-000000010"]
)
def test_a_run_has_many_names(run, typed, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    assert resolve_run.folder(typed) == resolve_run.existing(typed) == resolve_run.single(typed) == run
    assert resolve_run.runs(typed) == [run]


def test_a_run_file_names_a_folder_that_need_not_be_there(tmp_path):
    (tmp_path / "new.yaml").write_text(f"{RUN_FILE}run_dir: {tmp_path / 'new'}\n")
    typed = str(tmp_path / "new.yaml")
    assert resolve_run.single(typed).path == tmp_path / "new"
    with pytest.raises(UserError, match=r"there is no run folder .*new"):
        resolve_run.runs(typed)
    with pytest.raises(UserError, match="there is no run folder or run file"):
        resolve_run.folder(str(tmp_path / "nothing"))


def test_for_looking_on_a_run_file_need_not_be_valid(run):
    run.run_yaml.write_text("name: [")
    assert resolve_run.folder(str(run.path)) == run
    with pytest.raises(UserError):
        resolve_run.configured(str(run.path))


def test_an_array_is_its_elements_in_their_order(array):
    assert [run.path.name for run in resolve_run.runs(str(array))] == ["0", "1", "10"]
    assert resolve_run.single(str(array / "1")).path == array / "1"
    with pytest.raises(UserError, match="is an array of runs") as caught:
        resolve_run.single(str(array))
    assert str(array / "0") in caught.value.fix


@pytest.mark.parametrize("command", ["report", "compare", "watch"])
def test_commands_for_one_run_refuse_an_array(array, command, cli):
    assert "is an array of runs" in cli(command, array, code=64).err


@pytest.mark.parametrize(("typed", "step"), [("wave", None), ("wave.yaml", None), ("wave/checkpoints", None)])
def test_checkpoints_are_found_from_wherever_one_points(run, typed, step):
    store, found = locate_checkpoint(str(run.path.parent / typed))
    assert (store.path, found) == (run.checkpoints, step)


def test_a_checkpoint_is_meant_by_its_folder_in_a_run_or_not(run, tmp_path):
    named = run.checkpoints / "step-000000010"
    assert resolve_run.checkpoints(str(named)) == (run.checkpoints, 10)
    moved = tmp_path / "elsewhere" / "step-000000010"
    moved.parent.mkdir()
    named.rename(moved)
    assert resolve_run.checkpoints(str(moved)) == (moved.parent, 10)
    assert resolve_run.checkpoints(str(moved.parent)) == (moved.parent, None)


@pytest.mark.parametrize("command", ["status", "stop", "report", "explain", "watch", "logs"])
def test_a_folder_without_a_run_is_left_alone(command, tmp_path, cli):
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").touch()
    assert "is not the folder of a run" in cli(command, tmp_path, code=64).err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "notes.txt"]


def test_a_run_folder_that_was_moved_or_copied_is_meant_itself(run, tmp_path):
    copy, link = tmp_path / "copy", tmp_path / "link"
    shutil.copytree(run.path, copy)
    link.symlink_to(run.path)
    config, found = resolve_run.configured(str(copy))
    assert (config.run_dir, found) == (str(copy), RunDir(copy)), "its run file names the folder it was copied from"
    assert resolve_run.configured(str(link))[1] == run
    assert resolve_run.configured(str(copy), ["--run_dir", str(link)])[1].path == link
    run.path.rename(tmp_path / "moved")
    assert resolve_run.configured(str(tmp_path / "moved"))[1].path == tmp_path / "moved"

"""Stage-in: copies that are what their sources are, once, and paths that follow."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hpctrain.config.sections import Config, LaunchConfig, SlurmConfig, TrainConfig
from hpctrain.errors import Code, ExitCode, NoRequeue, UserError
from hpctrain.launch.engines.slurm import allocation, preflight, stage_on_node
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.rank.problem import staged_args
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import STAGED
from tests.support.programs import on_path


def staged(folder: Path, *sources: Path) -> dict[Path, Path]:
    """Stages and returns where things went."""
    targets = {source: stage_on_node.target(folder, source) for source in sources}
    stage_on_node.stage(folder, targets)
    return targets


def test_files_and_folders_are_copied(tmp_path):
    data = tmp_path / "my data"
    (data / "deep").mkdir(parents=True)
    (data / "deep" / "a.h5").write_bytes(os.urandom(100_000))
    single = tmp_path / "b.h5"
    single.write_bytes(b"x")
    targets = staged(tmp_path / "scratch", data, single)
    assert (targets[data] / "deep" / "a.h5").read_bytes() == (data / "deep" / "a.h5").read_bytes()
    assert targets[single].read_bytes() == b"x"


def test_sources_of_one_name_do_not_meet(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.h5").write_text(name)
    targets = staged(tmp_path / "scratch", tmp_path / "a" / "train.h5", tmp_path / "b" / "train.h5")
    assert sorted(path.read_text() for path in targets.values()) == ["a", "b"]


def test_a_copy_is_used_again_unless_the_source_has_changed(tmp_path):
    source = tmp_path / "a.h5"
    source.write_text("old")
    copy = staged(tmp_path / "scratch", source)[source]
    first = copy.stat().st_ino
    staged(tmp_path / "scratch", source)
    assert copy.stat().st_ino == first
    source.write_text("new")
    os.utime(source, ns=(1, 1))
    staged(tmp_path / "scratch", source)
    assert copy.read_text() == "new"


def test_a_torn_copy_is_made_again(tmp_path):
    source = tmp_path / "a.h5"
    source.write_text("whole")
    copy = staged(tmp_path / "scratch", source)[source]
    copy.write_text("to")
    staged(tmp_path / "scratch", source)
    assert copy.read_text() == "whole"


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(UserError, match="stage_in names"):
        staged(tmp_path / "scratch", tmp_path / "nothing.h5")


def test_no_room_is_said_before_copying(tmp_path, monkeypatch):
    source = tmp_path / "a.h5"
    source.write_text("x")
    monkeypatch.setattr(stage_on_node.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 0})())
    with pytest.raises(UserError, match=r"0\.0 GB free"):
        staged(tmp_path / "scratch", source)
    assert not (tmp_path / "scratch").exists()


def test_what_is_staged_is_the_users_own(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o777)
    staged(scratch)
    assert scratch.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(scratch)
    with pytest.raises(UserError, match=r"link on .* is not this user's own"):
        staged(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: scratch.stat().st_uid + 1)
    with pytest.raises(UserError, match=r"scratch on .* is not this user's own"):
        staged(scratch)


def test_paths_in_arguments_follow():
    values = {"data": "/a/x.h5", "more": ["/a/x.h5", 3], "deep": {"y": "/a/y.h5"}}
    environ = {STAGED: json.dumps({"/a/x.h5": "/s/x.h5"})}
    assert staged_args(values, environ) == {"data": "/s/x.h5", "more": ["/s/x.h5", 3], "deep": {"y": "/a/y.h5"}}
    assert staged_args(values, {}) == values


def test_an_environment_is_packed_once_and_works_elsewhere(tmp_path):
    prefix = tmp_path / "venv"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    (prefix / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    archive = tmp_path / "environment.tar"
    stage_on_node.pack(prefix, archive)
    first = archive.stat().st_ino
    os.utime(archive)
    stage_on_node.pack(prefix, archive)
    assert archive.stat().st_ino == first
    stage_on_node.unpack(archive, tmp_path / "node" / "environment")
    assert (tmp_path / "node" / "environment" / "bin" / "python").exists()


@pytest.mark.parametrize("content", [None, b"this is no archive"])
def test_an_environment_that_cannot_be_unpacked_is_explained(tmp_path, content):
    archive = tmp_path / "environment.tar"
    if content is not None:
        archive.write_bytes(content)
    with pytest.raises(UserError, match=f"cannot stage {archive} on ") as caught:
        stage_on_node.unpack(archive, tmp_path / "node" / "environment")
    assert f"remove {archive}" in caught.value.fix


def test_scratch_that_is_no_folder_is_explained(tmp_path):
    (tmp_path / "scratch").write_text("")
    with pytest.raises(UserError, match="Not a directory") as caught:
        staged(tmp_path / "scratch" / "job")
    assert "launch.slurm.scratch" in caught.value.fix


@pytest.mark.parametrize("kind", ["lib/python3.11/site-packages", "conda-meta"])
def test_an_environment_with_new_packages_is_packed_anew(tmp_path, kind):
    packages = tmp_path / "environment" / kind
    packages.mkdir(parents=True)
    os.utime(packages, (1, 1))
    archive = tmp_path / "environment.tar"
    stage_on_node.pack(tmp_path / "environment", archive)
    first = archive.stat().st_ino
    stage_on_node.pack(tmp_path / "environment", archive)
    assert archive.stat().st_ino == first
    os.utime(archive, (2, 2))
    (packages / "new").mkdir()
    stage_on_node.pack(tmp_path / "environment", archive)
    assert archive.stat().st_mtime > 2


NO_ROOM = {"what": "no room on n2", "fix": "make some", "code": "disk_full"}


@pytest.mark.parametrize(
    ("said", "what", "code"),
    [
        ("srun: error: n2: task 1: Killed", "srun: error: n2: task 1: Killed", Code.EXCEPTION),
        (f"noise\n0: {stage_on_node.MARK}{json.dumps(NO_ROOM)} noise", "no room on n2", Code.DISK_FULL),
        ("", "it ended with code 9", Code.EXCEPTION),
    ],
)
def test_a_stage_in_that_fails_on_a_node_ends_the_attempt(tmp_path, monkeypatch, said, what, code):
    on_path(tmp_path, monkeypatch, srun=f"echo '{said}' >&2\nexit 9")
    config = Config(name="r", launch=LaunchConfig(command=("true",), stage_in=("data.h5",)))
    with pytest.raises(NoRequeue, match="stage-in: ") as caught:
        allocation.stage_in(config, RunDir(tmp_path), Job("7", nodes=2, ranks=2, restarts=0, nodelist="n[1-2]"))
    assert (caught.value.what, caught.value.code) == (f"stage-in: {what}", code)


def test_a_node_tells_what_went_wrong_as_data(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["stage", str(tmp_path / "scratch"), str(tmp_path / "missing.h5")])
    assert stage_on_node.main() == ExitCode.USER_ERROR
    [report] = preflight.reports(capsys.readouterr().err.splitlines(), stage_on_node.MARK)
    assert "missing.h5" in report["what"] and (report["fix"], report["code"]) == (
        "correct the path, or put the file where all nodes see it",
        "user_error",
    )


def many_nodes(monkeypatch: pytest.MonkeyPatch, venv: bool = True) -> list[Path]:
    """Archives that are made of the environment, instead of making them."""
    made: list[Path] = []
    monkeypatch.setattr(sys, "base_prefix", "/usr" if venv else sys.prefix)
    monkeypatch.setattr(stage_on_node, "pack", lambda prefix, archive: made.append(archive))
    monkeypatch.setattr(allocation.client, "heard", lambda run, words, env, timeout_s: (0, ""))
    return made


@pytest.mark.parametrize(
    ("nodes", "asked", "venv", "wrap", "expected"),
    [
        (31, None, True, (), False),
        (32, None, True, (), True),
        (32, False, True, (), False),
        (32, None, False, (), False),
        (32, None, True, ("apptainer", "exec"), False),
        (2, True, True, (), True),
    ],
)
def test_the_environment_is_staged_by_default_on_many_nodes(
    tmp_path, monkeypatch, nodes, asked, venv, wrap,
    expected,
)  :  # fmt: skip
    made = many_nodes(monkeypatch, venv)
    launch = LaunchConfig(stage_environment=asked, slurm=SlurmConfig(scratch=str(tmp_path), wrap=wrap))
    config = Config(name="r", task="a:b", train=TrainConfig(steps=1, global_batch=2), launch=launch)
    interpreter, _ = allocation.stage_in(config, RunDir(tmp_path), Job("7", nodes, nodes, 0, "n[1-32]"))
    assert bool(made) is expected
    assert interpreter.startswith(str(tmp_path / "hpctrain-7" / "environment")) is expected


def test_an_environment_that_nobody_asked_to_stage_ends_nothing(tmp_path, monkeypatch, capsys):
    def full(prefix, archive):
        raise UserError("no space left", "free space")

    many_nodes(monkeypatch)
    monkeypatch.setattr(stage_on_node, "pack", full)
    config = Config(name="r", task="a:b", train=TrainConfig(steps=1, global_batch=2))
    job = Job("7", 32, 32, 0, "n[1-32]")
    assert allocation.stage_in(config, RunDir(tmp_path), job) == (sys.executable, {})
    assert "no space left" in capsys.readouterr().err

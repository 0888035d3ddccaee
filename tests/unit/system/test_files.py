"""Files and folders that somebody has prepared: nothing elsewhere is written or removed, and nothing waits."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import RunFailed
from hpctrain.system import files
from hpctrain.system.output import redirect
from tests.conftest import NOT_PERMITTED
from tests.support.hostile import SOMEBODY, as_somebody


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """A folder of the user's own that has nothing to do with runs."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work\n")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def is_untouched(thesis: Path) -> bool:
    return [path.name for path in thesis.iterdir()] == ["chapter.tex"] and (
        thesis / "chapter.tex"
    ).read_text() == "years of work\n"


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "append": lambda path, root: files.append_bytes(path, b"x\n", root),
    "overwrite": lambda path, root: files.overwrite(path, b"x\n", root),
    "create": lambda path, root: files.create_exclusively(path, b"x\n", root),
    "replace": lambda path, root: files.write_atomically(path, b"x\n", root),
    "log": lambda path, root: os.close(files.open_log(path, root)),
    "fresh log": lambda path, root: os.close(files.open_log(path, root, fresh=True)),
    "make": files.make_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_to_a_file_is_not_written_through(name, run, thesis):
    (run / "word").symlink_to(thesis / "chapter.tex")
    try:
        WRITERS[name](run / "word", run)
    except (files.Diverted, RunFailed):
        assert (run / "word").is_symlink()
    assert is_untouched(thesis)


@pytest.mark.parametrize("depth", ["ranks", "ranks/2"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_link_to_a_folder_is_not_walked_through(name, depth, run, thesis):
    (run / depth).parent.mkdir(exist_ok=True)
    (thesis / "2").mkdir()
    (run / depth).symlink_to(thesis)
    with pytest.raises((files.Diverted, RunFailed), match="is a link"):
        WRITERS[name](run / "ranks" / "2" / "word", run)
    (thesis / "2").rmdir()
    assert is_untouched(thesis)


def test_a_folder_behind_a_link_is_not_removed(run, thesis):
    (run / "ranks").mkdir()
    (run / "ranks" / "2").symlink_to(thesis)
    with pytest.raises(files.Diverted, match="ranks/2 is a link"):
        files.remove_folder(run / "ranks" / "2", run)
    assert is_untouched(thesis)


def test_a_link_in_a_folder_that_is_removed_goes_and_what_it_names_stays(run, thesis):
    (run / "2").mkdir()
    (run / "2" / "a").symlink_to(thesis / "chapter.tex")
    (run / "2" / "b").write_text("")
    files.remove_folder(run / "2", run)
    assert not (run / "2").exists() and is_untouched(thesis)


def test_links_on_the_way_to_the_users_folder_are_the_users(tmp_path, run):
    (tmp_path / "home").symlink_to(run)
    root = tmp_path / "home"
    files.make_folder(root / "ranks" / "2", root)
    for name, write in WRITERS.items():
        write(root / "ranks" / "2" / name, root)
    assert {path.name for path in (run / "ranks" / "2").iterdir()} == set(WRITERS)


@pytest.mark.parametrize("name", ["append", "overwrite", "log"])
def test_nobody_waits_for_a_pipes_other_end(name, run):
    os.mkfifo(run / "word")
    with pytest.raises(files.Diverted, match="word is not"):
        WRITERS[name](run / "word", run)


def test_a_fresh_log_replaces_what_was_there(run):
    (run / "log").write_text("old")
    with os.fdopen(files.open_log(run / "log", run, fresh=True), "wb") as log:
        log.write(b"new")
    assert (run / "log").read_text() == "new"


def test_output_goes_to_no_log_behind_a_link(run, thesis):
    (run / "logs").mkdir()
    (run / "logs" / "0.out").symlink_to(thesis / "chapter.tex")
    program = f"import sys\nfrom pathlib import Path\nfrom {redirect.__module__} import redirect\n"
    program += "redirect(Path(sys.argv[1], 'logs', '0.out'), Path(sys.argv[1]), keep_stdout=False)\nprint('here')"
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
    assert is_untouched(thesis)


def test_files_are_not_for_everybody_to_write(run):
    former = os.umask(0)
    try:
        files.make_folder(run / "a", run)
        for name, write in WRITERS.items():
            write(run / "a" / name, run)
    finally:
        os.umask(former)
    assert not [path for path in (run / "a", *(run / "a").iterdir()) if path.stat().st_mode & stat.S_IWOTH]


def refusing(code: int) -> Callable[..., int]:
    """A system call that fails."""

    def call(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(("code", "exit_code"), [(errno.EACCES, 64), (errno.EPERM, 64), (errno.ENOSPC, 70)])
def test_a_file_that_this_user_may_not_write_is_not_tried_again(run, monkeypatch, code, exit_code):
    """As in the run folder of another user, who has not shared it."""
    monkeypatch.setattr(os, "open", refusing(code))
    with pytest.raises(RunFailed, match="cannot write") as error:
        files.write_atomically(run / "2.json", b"{}", run)
    assert (error.value.exit_code, "run_dir" in error.value.fix) == (exit_code, exit_code == 64)


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_nothing_can_be_written_to_is_not_left_empty(run, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", refusing(errno.EOPNOTSUPP))
    monkeypatch.setattr(os, "fsync", refusing(errno.EDQUOT))  # NFS tells of a quota only now
    with pytest.raises(RunFailed, match="cannot write"):
        files.create_exclusively(run / "STOP", b"requeue", run)
    assert not list(run.iterdir())
    monkeypatch.undo()
    assert files.create_exclusively(run / "STOP", b"requeue", run)


@pytest.mark.parametrize("links", [True, False])
def test_of_several_one_creates_a_file_and_others_see_it_whole(run, monkeypatch, links):
    seen: list[bool] = []
    if not links:
        monkeypatch.setattr(os, "link", refusing(errno.EXDEV))
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append((run / "STOP").exists()))
    assert files.create_exclusively(run / "STOP", b"first", run) and seen[-1] is not links
    assert not files.create_exclusively(run / "STOP", b"second", run)
    assert [path.name for path in run.iterdir()] == ["STOP"] and (run / "STOP").read_bytes() == b"first"


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO])
def test_a_link_that_nfs_makes_twice_is_ones_own(run, monkeypatch, code):
    """The first reply is lost: the second says that the name exists, or the server does not answer any more."""

    def linked(*paths, once=os.link, **folders):
        once(*paths, **folders)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", linked)
    assert files.create_exclusively(run / "1.json", b"mine", run)
    assert [path.name for path in run.iterdir()] == ["1.json"] and (run / "1.json").read_bytes() == b"mine"


# Replacing


def test_a_replacement_appears_whole_or_not_at_all(run):
    path = run / "a.h5"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacement(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert [entry.name for entry in run.iterdir()] == ["a.h5"] and path.read_text() == "old"
    with files.replacement(path) as temporary:
        assert temporary.suffix == ".h5" and temporary.parent == run
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert [entry.name for entry in run.iterdir()] == ["a.h5"] and path.read_text() == "new"


@pytest.mark.parametrize("links", [True, False])
def test_the_first_of_several_may_win(run, links, monkeypatch):
    def no_links(*_):
        raise PermissionError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = run / "a.h5"
    with files.replacement(path, first_wins=True) as second:
        second.write_text("second")
        with files.replacement(path, first_wins=True) as first:
            first.write_text("first")
        assert path.read_text() == "first"
    assert [entry.name for entry in run.iterdir()] == ["a.h5"] and path.read_text() == "first"


def test_a_file_that_cannot_be_replaced_leaves_nothing(run):
    (run / "a").mkdir()
    with pytest.raises(RunFailed, match="cannot write"):
        files.write_atomically(run / "a", b"x", run)
    assert [entry.name for entry in run.iterdir()] == ["a"]


# Private folders


def test_a_private_folder_is_made_private(run):
    (run / "a").mkdir(mode=0o755)
    for name in ("a", "b"):
        files.make_private(run / name)
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o700


def test_a_private_folder_is_no_link(run, thesis):
    thesis.chmod(0o755)
    (run / "a").symlink_to(thesis)
    with pytest.raises(files.Diverted, match="is a link"):
        files.make_private(run / "a")
    assert stat.S_IMODE(thesis.stat().st_mode) == 0o755


def test_a_private_folder_is_no_other_users(tmp_path):
    """Who knows its name can make it first, in a folder that all may write to."""
    if not as_somebody():
        pytest.skip(f"{NOT_PERMITTED}becoming another user")
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):  # pytest's own are private
        folder.chmod(folder.stat().st_mode | 0o011)
    subprocess.run([*as_somebody(), "mkdir", "-m", "777", str(shared / "job")], check=True, timeout=60)
    assert (shared / "job").stat().st_uid == SOMEBODY
    with pytest.raises(files.Diverted) as caught:
        files.make_private(shared / "job")
    assert caught.value.errno == errno.EPERM
    assert (shared / "job").stat().st_mode & 0o777 == 0o777, "it is the other one's, and stays as it is"


def test_a_file_system_that_cannot_sync_folders_holds_runs_too(run, monkeypatch):
    """Every save failed there."""
    real, syncs = os.fsync, []

    def fsync(descriptor: int) -> None:
        syncs.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if syncs[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files.sync(run)
    assert syncs == [True]
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "")))
    with pytest.raises(OSError, match="5"):
        files.sync(run)

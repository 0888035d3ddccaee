"""What the command line makes of errors."""

import os

import pytest

from hpctrain import cli


def test_a_home_that_is_not_set_is_looked_up(monkeypatch, capsys):
    """mpirun ended with 'Unable to get the user home directory'."""
    monkeypatch.delenv("HOME")
    cli.main([])
    assert os.path.isabs(os.environ["HOME"])


def test_a_user_without_a_name_has_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert cli.main(["--version-of-nothing"]) == 64
    assert os.environ["HOME"] == "/"


def test_a_framework_that_is_not_installed_is_one_sentence(monkeypatch, capsys):
    """``ckpt export -o x.pt`` and ``plan`` ended with a traceback."""

    def refused(name):
        def dispatch(words):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(cli, "dispatch", dispatch)
        return cli.main([])

    assert refused("torch") == 64
    assert capsys.readouterr().err == 'hpctrain: torch is not installed\n  fix: pip install "hpctrain[torch]"\n'
    with pytest.raises(ModuleNotFoundError, match="own"):
        refused("own")


def test_a_run_of_somebody_else_is_one_sentence(monkeypatch, capsys):
    def refused(words):
        raise PermissionError(13, "Permission denied", "/runs/ann/run.json")

    monkeypatch.setattr(cli, "dispatch", refused)
    assert cli.main(["status", "/runs/ann"]) == 64
    assert capsys.readouterr().err.startswith("hpctrain: /runs/ann/run.json: Permission denied\n  fix: ")


def test_a_closed_output_and_a_deleted_folder_are_one_sentence(monkeypatch, capsys, tmp_path):
    """Both ended with a traceback, in the middle of a start."""
    with monkeypatch.context() as closed:
        closed.setattr("sys.stdout", None)
        assert cli.main(["status"]) == 64
    assert capsys.readouterr().err.startswith("hpctrain: standard output is closed\n  fix: ")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["status"]) == 64
    assert capsys.readouterr().err.startswith("hpctrain: the working folder has been deleted\n  fix: ")


def test_the_spelling_of_mpirun_is_told(capsys):
    assert cli.main(["run", "-np", "2", "run.yaml"]) == 64
    assert "write -n, as in hpctrain run -n 2" in capsys.readouterr().err

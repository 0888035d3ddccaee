"""A verdict reaches its reader although the run folder, or the disk behind the job's log, takes nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from tests.support.programs import write_programs

pytestmark = pytest.mark.slow

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1"}
SCONTROL = """\
case $* in
    *Comment=*) echo "$*" >> {folder}/comments;;
    *"show job"*) echo 'JobId=7 JobState=RUNNING Requeue=1 Restarts=0';;
    *hostnames*) echo n1;;
esac
"""
SRUN = """\
case $* in
    *--mpi=list*) echo none;;
    *) {then};;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs stand for Slurm's; ``comments`` in it holds what the job was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_programs(folder, scontrol=SCONTROL.format(folder=folder), srun=SRUN.format(then="exit 3"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def supervise(tmp_path: Path, folder: Path, output: str, launch: str = "") -> int:
    """Exit code of the batch script of a run in this folder."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f'name: r\nrun_dir: {folder}\nlaunch: {{command: ["true"], preflight: false, max_failures: 1{launch}}}\n'
    )
    with open(output, "wb") as file:
        words = [sys.executable, "-m", "hpctrain", "supervise", str(run_file)]
        return subprocess.run(
            words, env={**os.environ, **JOB}, stdout=file, stderr=file, timeout=100, check=False
        ).returncode


def test_a_run_folder_that_cannot_be_written_is_told_in_the_jobs_comment(tmp_path, slurm):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "attempts").write_text("in the way")
    assert supervise(tmp_path, folder, "/dev/full") == ExitCode.FAILURE, "not 120: Python's own, of output that is lost"
    assert f"JobId=7 Comment=hpctrain: cannot write {folder}/attempts" in (slurm / "comments").read_text()


def test_a_verdict_that_nobody_can_read_in_the_log_is_told_in_the_jobs_comment(tmp_path, slurm):
    code = supervise(tmp_path, tmp_path / "run", "/dev/full", ", slurm: {comment: project 12}")
    assert code == ExitCode.DO_NOT_REQUEUE
    comment = (slurm / "comments").read_text()
    assert "Comment=project 12; hpctrain: 1 of 1 ranks ended before they could say why" in comment
    assert len(comment.splitlines()) == 1


def test_a_verdict_that_is_in_the_log_and_the_run_folder_leaves_the_comment_alone(tmp_path, slurm):
    log = tmp_path / "log"
    assert supervise(tmp_path, tmp_path / "run", str(log)) == ExitCode.DO_NOT_REQUEUE
    assert "ended before they could say why" in log.read_text()
    assert not (slurm / "comments").exists()

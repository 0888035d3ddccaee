"""Whom ``hpctrain stop`` asks, and whom it cancels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.launch.engines import schedulers
from hpctrain.launch.engines.jobs import Submitted, record, submissions
from hpctrain.launch.engines.slurm import client, requeue, submission
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.run_status import QueueEntry
from hpctrain.run.stop_request import requested_stop
from tests.support.programs import write_programs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with one running and one waiting job."""
    entries = [QueueEntry(*each, "", "", "", "", "", "") for each in (("7", "RUNNING"), ("8", "PENDING"))]
    monkeypatch.setattr(client, "find", lambda name: name)
    monkeypatch.setattr(schedulers, "alive", lambda runs: [entries for _ in runs])
    monkeypatch.setattr(client, "origin", lambda job: client.Origin("r", f"{tmp_path}/job.sbatch", "/", ""))
    (tmp_path / "jobs.jsonl").touch()
    return RunDir(tmp_path)


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that were cancelled."""
    found: list[str] = []

    def cancel(ids: Sequence[str]) -> None:
        found.extend(ids)

    monkeypatch.setattr(client, "cancel", cancel)
    return found


def test_a_job_at_work_is_asked(run, cancelled, cli):
    lock = LiveLock(run, dataclasses.replace(myself(), job="7"))
    lock.acquire()
    cli("stop", run.path)
    assert cancelled == ["8"] and requested_stop(run) is not None


def test_a_job_whose_attempt_has_not_begun_does_not_begin_it(run, cancelled, cli):
    cli("stop", run.path)
    assert cancelled == ["7", "8"]


def test_a_run_in_an_interactive_allocation_is_asked(tmp_path, cli):
    run = RunDir(tmp_path)
    LiveLock(run, dataclasses.replace(myself(), job="99")).acquire()
    cli("stop", run.path)
    assert requested_stop(run) is not None


def test_a_run_without_a_job_is_asked(run, cancelled, cli):
    LiveLock(run, dataclasses.replace(myself(), job=None)).acquire()
    cli("stop", run.path)
    assert not cancelled and requested_stop(run) is not None


SQUEUE = """\
echo "$@" >> {folder}/asked
case "$*" in *--jobs*) for job in {jobs}; do echo "$job|$job|N/A|PENDING|0:00|1:00|1:00||N/A|None"; done;; esac
"""
SCONTROL = """\
cat {folder}/job-$3 2>/dev/null || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }}
"""
SCANCEL = """\
echo "$@" >> {folder}/cancelled
"""
ORIGIN = """JobId={number} JobName={name}
   UserId=me(1) GroupId=me(1) MCS_label=N/A
   Command={command}
   WorkDir={cwd}
   StdErr={log}
   StdIn=/dev/null
   StdOut={log}
"""


@dataclasses.dataclass(frozen=True)
class FakeSlurm:
    """Commands that tell of the jobs given to ``knows``, and note what is cancelled."""

    folder: Path

    def knows(self, number: str, command: Path | str, log: Path | str, cwd: str = "/work", name: str = "r") -> None:
        text = ORIGIN.format(number=number, name=name, command=command, cwd=cwd, log=log)
        (self.folder / f"job-{number}").write_text(text)
        jobs = " ".join(path.name.removeprefix("job-") for path in self.folder.glob("job-*"))
        scripts = {"squeue": SQUEUE, "scontrol": SCONTROL, "scancel": SCANCEL}
        made = {name: script.format(folder=self.folder, jobs=jobs) for name, script in scripts.items()}
        write_programs(self.folder, **made)

    def cancelled(self) -> str:
        """Words of all calls of scancel."""
        path = self.folder / "cancelled"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm's commands on PATH."""
    made = FakeSlurm(tmp_path / "slurm")
    made.folder.mkdir()
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    client.origin.cache_clear()
    return made


def submitted(tmp_path: Path, *jobs: str) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.run_yaml.write_text("name: r\nlaunch: {command: [sh]}\n")
    for job in jobs:
        record(run, Submitted(job, 0.0, "/work"))
    return run


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_a_job_that_somebody_has_written_into_the_folder_is_left_alone(tmp_path, fake, capsys, command):
    run = submitted(tmp_path, "41", "42")
    fake.knows("41", run.path / "job.sbatch", "/elsewhere/x.out")
    fake.knows("42", "/home/me/thesis/job.sbatch", "/home/me/thesis/logs/slurm-42.out", name="r")
    assert main([command, str(run.path)]) == 0
    assert fake.cancelled() == "41"
    said = capsys.readouterr().out
    assert "job 42 is left alone: it is 'r' of /work" in said and "scancel 42 ends it" in said


@pytest.mark.parametrize("line", ["--user=me", "42 43", "42,43", "", "a", None, ["42"], "٤٢"])
def test_what_is_no_job_number_reaches_no_command_of_slurms(tmp_path, fake, line, cli):
    run = submitted(tmp_path)
    fake.knows("42", "/home/me/thesis/job.sbatch", "")
    (run.path / "jobs.jsonl").write_text(json.dumps({"job": line, "time": 0.0, "cwd": "/"}) + "\n")
    assert submissions(run) == []
    cli("cancel", run.path)
    assert not fake.cancelled() and "--jobs" not in (fake.folder / "asked").read_text()


def test_how_slurm_tells_whose_a_job_is(tmp_path):
    run, array = submitted(tmp_path), RunDir(tmp_path / "array" / "3")
    array.create()
    (tmp_path / "file.yaml").write_text(f"name: r\nlaunch: {{command: [sh]}}\nrun_dir: {run.path}\n")
    (tmp_path / "a b.yaml").write_text("name: wave\nlaunch: {command: [sh]}\n")
    (run.path / "more").symlink_to(tmp_path)

    def is_of(run, command="", log="", cwd="/work", job="7"):
        return submission.is_of(run, job, client.Origin("r", str(command), str(cwd), str(log)))

    assert is_of(run, command=run.path / "job.sbatch"), "hpctrain submit"
    assert is_of(run, command="/any/script", log=run.path / "logs" / "slurm-7.out"), "hpctrain render, then sbatch"
    assert is_of(run, command=f"/any/portable.sbatch {tmp_path}/file.yaml"), "a script for any run file"
    assert is_of(run, command="/any/portable.sbatch file.yaml", cwd=tmp_path)
    wave = RunDir(tmp_path / "runs" / "wave")
    wave.create()
    assert is_of(wave, command="/any dir/portable.sbatch a b.yaml", cwd=tmp_path)
    assert is_of(array, command=array.path.parent / "job.sbatch", job="7_3"), "an element of an array"
    assert is_of(array, log=array.path.parent / "logs" / "slurm-7_3.out", job="7_3")
    assert is_of(array, command=array.path / "job.sbatch"), "one that was resumed by itself"
    for job in ("7_2", "7"):
        assert not is_of(array, command=array.path.parent / "job.sbatch", job=job), "another element, or all of them"

    (tmp_path / "link").symlink_to(run.path)
    assert is_of(RunDir(tmp_path / "link"), command=run.path / "job.sbatch"), "another way to the same folder"
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    (other.path / "logs").symlink_to(run.logs)
    (other.path / "job.sbatch").symlink_to(run.path / "job.sbatch")
    assert not is_of(other, command=run.path / "job.sbatch", log=run.logs / "slurm-7.out"), "links that lie in it"
    assert not is_of(other, command=f"/any/portable.sbatch {tmp_path}/file.yaml")
    assert not is_of(run, command="(null)", log="/scratch/slurm-7.out")
    assert not is_of(run)


def test_the_end_of_a_run_takes_only_its_own_jobs_out_of_the_queue(tmp_path, fake, capsys):
    run = submitted(tmp_path, "40", "41", "42", "43")
    for job in ("40", "41"):
        fake.knows(job, run.path / "job.sbatch", "")
    fake.knows("42", "/home/me/thesis/job.sbatch", "")
    requeue.end_chain(run, Job("40", 1, 1, 0, "n1"))
    assert fake.cancelled() == "--state=PENDING 41", "42 is another run's, and 43 is forgotten"
    assert "job 42 is left alone" in capsys.readouterr().err

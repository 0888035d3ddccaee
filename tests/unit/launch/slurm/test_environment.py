"""Slurm's commands do as hpctrain says, whatever the user's environment; no job that Slurm accepted is lost."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.errors import ExitCode
from hpctrain.launch.engines.jobs import Submitted, record, submissions
from hpctrain.launch.engines.slurm import client, profile, submission, supervise
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.launch.engines.slurm.requeue import succeed
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.stop_request import requested_stop
from tests.support.programs import on_path, write_programs

RUN_FILE = "name: r\nlaunch: {command: [sh]}\n"

SQUEUE = """\
case "$*" in
*--jobs=*) for job in $(cat queue); do echo "$job|$job|N/A|PENDING|0:00|1:00|1:00||N/A|None"; done;;
*) for job in $(cat queue); do echo "$job|PENDING|{run}/job.sbatch"; done;;
esac
"""
SBATCH_TOO_LATE = "echo 235 >> queue\nexec sleep 20"
"""It submits, but answers when nobody waits any more."""
SCONTROL = """\
printf 'JobName=r\\n Command={run}/job.sbatch\\n WorkDir=/\\n StdOut=/x\\n'
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of Slurm's commands and of their queue, which is the working folder; its jobs are those of runs/r."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "accounted", lambda ids, timeout_s=0.0: [])
    client.origin.cache_clear()
    (tmp_path / "queue").write_text("")
    (tmp_path / "r.yaml").write_text(RUN_FILE)
    run = tmp_path / "runs" / "r"
    scancel = "echo $@ >> cancelled"
    programs = {"squeue": SQUEUE, "sbatch": SBATCH_TOO_LATE, "scontrol": SCONTROL, "scancel": scancel}
    on_path(tmp_path, monkeypatch, **{name: text.replace("{run}", str(run)) for name, text in programs.items()})
    return tmp_path


def test_no_variable_of_the_user_is_an_option_of_slurms_commands(monkeypatch):
    options = ("SQUEUE_PARTITION", "SCANCEL_STATE", "SBATCH_WAIT", "SRUN_EXPORT_ENV", "SALLOC_QOS", "SLURM_CLUSTERS")
    for name in (*options, "SCONTROL_LOCAL", "SACCT_LOCAL", "SINFO_PARTITION", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/elsewhere.conf")
    monkeypatch.setenv("OTHER", "stays")
    given = client.environment()
    assert {name for name in given if given[name] == "x"} == set()
    assert given["SLURM_CONF"] == "/etc/elsewhere.conf" and given["OTHER"] == "stays"


def test_steps_of_a_job_do_not_take_srun_s_options_from_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SRUN_EXPORT_ENV", "NONE")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(supervise, "current", object)
    monkeypatch.setattr(supervise, "StopSignals", None)  # ends the function
    with pytest.raises(TypeError):
        supervise.supervise_job(str(tmp_path / "run.yaml"))
    assert "SRUN_EXPORT_ENV" not in os.environ and os.environ["SLURM_JOB_ID"] == "7"


def test_every_command_of_slurms_gets_that_environment(tmp_path, monkeypatch):
    script = '[ -z "$SBATCH_ARRAY_INX$SQUEUE_USERS$SRUN_DEBUG" ] && echo 5'
    on_path(tmp_path, monkeypatch, squeue=script, sbatch=script, srun=script)
    for name in ("SBATCH_ARRAY_INX", "SQUEUE_USERS", "SRUN_DEBUG"):
        monkeypatch.setenv(name, "1")
    assert client.submit(tmp_path / "job.sbatch") == "5"
    assert client.run(["squeue"]) == "5\n"
    assert client.mpi_types() == ["5"]


def test_what_the_run_file_leaves_open_comes_from_the_site_s_variables(monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "p1")
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    launch = LaunchConfig(slurm=SlurmConfig(partition="short"))
    slurm = profile.resolve(launch, Path("/nowhere")).slurm
    assert (slurm.account, slurm.partition, slurm.time) == ("p1", "short", "01:00:00")


def test_variables_that_are_ignored_are_named(slurm, monkeypatch, cli):
    monkeypatch.setenv("SBATCH_ACCOUNT", "p1")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    said = cli("submit", "--dry-run", "r.yaml")
    assert "#SBATCH --account=p1" in said.out
    assert "SBATCH_TIMELIMIT: ignored, set launch.slurm instead" in said.err and "SBATCH_ACCOUNT" not in said.err


def test_a_job_that_sbatch_took_too_late_is_recorded_and_not_submitted_again(slurm, monkeypatch, cli):
    monkeypatch.setattr(client.run, "__defaults__", (0.5,))
    cli("submit", "r.yaml")
    run = RunDir(slurm / "runs" / "r")
    assert [each.job for each in submissions(run)] == ["235"]
    assert (
        "job 235" in cli("submit", "r.yaml", code=ExitCode.USER_ERROR).err and (slurm / "queue").read_text() == "235\n"
    )


def test_a_job_that_nobody_recorded_is_found_before_another_is_submitted(slurm, cli):
    (slurm / "queue").write_text("9\n")
    assert "job 9" in cli("submit", "r.yaml", code=ExitCode.USER_ERROR).err and (slurm / "queue").read_text() == "9\n"


def test_a_job_in_place_of_this_one_that_sbatch_took_too_late_is_recorded(slurm, monkeypatch):
    monkeypatch.setattr(client.run, "__defaults__", (0.5,))
    run = RunDir(slurm / "runs" / "r")
    run.create()
    record(run, Submitted("234", 0.0, "/"))
    (slurm / "queue").write_text("234\n")
    succeed(run, Job("234", 1, 1, 0, "n1"))
    assert [(each.job, each.replaces) for each in submissions(run)] == [("234", None), ("235", "234")]


def test_elements_of_an_array_are_found_by_the_script_above_them(tmp_path, monkeypatch):
    jobs = {"12_3": "PENDING", "12_4": "RUNNING", "11_3": "COMPLETED"}
    scripts = {job: (state, f"{tmp_path}/job.sbatch") for job, state in jobs.items()}
    monkeypatch.setattr(client, "own_scripts", lambda timeout_s: scripts)
    assert submission.unrecorded([RunDir(tmp_path / "3"), RunDir(tmp_path)]) == [["12_3"], ["12_3", "12_4"]]
    record(RunDir(tmp_path), Submitted("12", 0.0, "/"))
    assert submission.unrecorded([RunDir(tmp_path)]) == [[]]


@pytest.mark.parametrize("target", ["r.yaml", "runs/r"])
def test_a_job_whose_run_folder_was_deleted_is_found(slurm, target, cli):
    (slurm / "queue").write_text("9\n")
    assert "job 9 PENDING" in cli("status", target).out
    cli("cancel", target)
    assert (slurm / "cancelled").read_text() == "9\n"
    (slurm / "queue").write_text("")
    cli("cancel", target, code=ExitCode.USER_ERROR)


def test_a_run_is_asked_to_stop_without_a_controller(slurm, capsys):
    run = RunDir(slurm / "runs" / "r")
    run.create()
    LiveLock(run, dataclasses.replace(myself(), job="7")).acquire()
    write_programs(slurm, squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    assert main(["stop", "runs/r"]) == 0
    assert requested_stop(run) is not None
    said = capsys.readouterr().out
    assert "asked the run to save a checkpoint and stop" in said and "Unable to contact slurm controller" in said


def test_who_stops_a_program_hears_that_hpctrain_cannot_save_it(slurm, cli):
    run = RunDir(slurm / "runs" / "r")
    run.create()
    run.run_yaml.write_text(RUN_FILE)
    LiveLock(run, myself()).acquire()
    assert "asked the run to stop; what it has not saved itself is lost" in cli("stop", "runs/r").out


def test_a_program_is_submitted_without_a_run_file(slurm, cli):
    script = cli("submit", "--dry-run", "--launch.nodes", "2", "--", "python", "ddp.py", "--epochs", "3").out
    assert "--nodes=2" in script and f"{os.getcwd()}/runs/ddp/run.yaml" in script


def test_a_run_folder_in_which_slurm_finds_no_log_is_refused(slurm, cli):
    assert "has a backslash" in cli("submit", "--dry-run", "r.yaml", "--run_dir", "a\\b", code=ExitCode.USER_ERROR).err


@pytest.mark.parametrize("name", ["time: 30", "memory: 0"])
def test_numbers_are_values_of_slurms_keys(slurm, name, cli):
    (slurm / "r.yaml").write_text(
        f"name: r\nlaunch:\n  command: [sh, -n, 4]\n  env: {{OMP_NUM_THREADS: 4}}\n  slurm: {{{name}}}\n"
    )
    script = cli("submit", "--dry-run", "r.yaml").out
    assert "export OMP_NUM_THREADS=4" in script
    assert {"time: 30": "--time=30", "memory: 0": "--mem=0"}[name] in script


def test_a_refused_submission_leaves_the_run_as_it_was(slurm, cli):
    run = RunDir(slurm / "runs" / "r")
    run.create()
    run.run_yaml.write_text("name: r\n# as it was trained\n")
    (run.path / "job.sbatch").write_text("as it was submitted\n")
    write_programs(slurm, sbatch="echo 'Invalid account' >&2; exit 1")
    cli("submit", "r.yaml", "--launch.nodes", "2", code=ExitCode.FAILURE)
    assert run.run_yaml.read_text() == "name: r\n# as it was trained\n"
    assert (run.path / "job.sbatch").read_text() == "as it was submitted\n"
    write_programs(slurm, sbatch="echo 7")
    cli("submit", "r.yaml", "--launch.nodes", "2")
    assert "nodes: 2" in run.run_yaml.read_text() and "--nodes=2" in (run.path / "job.sbatch").read_text()

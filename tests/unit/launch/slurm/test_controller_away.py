"""A controller of Slurm's that is away for a while, and a site that does not requeue."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import Code, ExitCode, RunFailed
from hpctrain.launch import attempt as attempts
from hpctrain.launch import outage_retry
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.engines.jobs import submissions
from hpctrain.launch.engines.slurm import client, requeue
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.launch.engines.slurm.supervise import follow
from hpctrain.launch.supervisor import supervise
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.stop_request import StopRequest, request_stop
from hpctrain.run.verdict import Action, RunVerdict
from tests.support.programs import write_programs

JOB = Job("7", nodes=2, ranks=4, restarts=0, nodelist="n[1-2]")
AWAY = """\
srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller (connect failure)
srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 1
"""
"""What srun 22.05 says."""
GAVE_UP = "srun: error: Timed out waiting for job step to complete"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stand for Slurm's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(outage_retry, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(attempts, "PAUSES_S", (0.0, 0.0))
    return tmp_path


def away(folder: Path, times: int, said: str, then: str) -> str:
    """Lines of a program that finds no controller at its first calls."""
    count = f"echo x >> {folder}/calls; [ $(wc -l < {folder}/calls) -gt {times} ]"
    return f"{count} || {{ cat >&2 <<'END'\n{said}\nEND\nexit 1; }}\n{then}"


def calls(folder: Path) -> int:
    return (folder / "calls").read_text().count("x")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (AWAY, True),
        ("srun: error: Unable to create step for job 7: Socket timed out on send/recv operation", True),
        ("srun: error: Unable to create step for job 7: Requested node configuration is not available", False),
        ("srun: Job step creation temporarily disabled, retrying (Requested nodes are busy)", False),
        (GAVE_UP, False),
        ("Unable to contact slurm controller (connect failure)", False),
    ],
)
def test_what_srun_says_of_a_controller_that_is_away(said, expected):
    assert bool(client.unheard(f"before\n{said}\nafter")) is expected


def test_a_step_waits_for_the_controller(programs, capfd):
    write_programs(programs, srun=away(programs, 2, AWAY, "echo told"))
    assert client.heard(RunDir(programs / "run"), ["srun", "true"], {}, 60) == (0, "told\n")
    assert calls(programs) == 3
    assert capfd.readouterr().err.count("Unable to contact slurm controller") == 2


def test_a_step_does_not_wait_for_ever(programs):
    write_programs(programs, srun=away(programs, 99, AWAY, ""))
    with pytest.raises(RunFailed, match=r"Slurm starts no step .*Unable to contact"):
        client.heard(RunDir(programs / "run"), ["srun", "true"], {}, 60)
    assert calls(programs) == 3


def test_a_step_that_fails_for_another_reason_is_not_started_again(programs):
    write_programs(programs, srun=away(programs, 99, GAVE_UP, ""))
    code, output = client.heard(RunDir(programs / "run"), ["srun", "true"], {}, 60)
    assert (code, output.strip(), calls(programs)) == (1, GAVE_UP, 1)


def launched(programs: Path) -> RunVerdict:
    """The verdict on an attempt whose launcher is the program ``srun``."""
    rank = [sys.executable, "-m", "hpctrain.programs.plain_command", "true"]
    launch = Launch(["srun", *rank], {}, 1, saves=False, unheard=lambda text: bool(client.unheard(text)))
    return supervise(RunDir(programs / "run"), lambda number: launch, Limits(), Attempt())


@pytest.mark.parametrize(
    ("times", "action", "starts"), [(0, Action.DONE, 1), (2, Action.DONE, 3), (99, Action.REQUEUE, 3)]
)
def test_the_ranks_start_once_the_controller_is_back(programs, times, action, starts):
    write_programs(programs, srun=away(programs, times, AWAY, 'PMI_RANK=0 exec "$@"'))
    assert launched(programs).action is action
    assert calls(programs) == starts
    assert [each.number for each in Attempts(RunDir(programs / "run")).all()] == [1], "one attempt"


def test_a_stop_request_ends_the_wait_for_the_controller(programs, monkeypatch):
    monkeypatch.setattr(attempts, "PAUSES_S", (100.0,))
    run = RunDir(programs / "run")
    run.create()
    write_programs(programs, srun=away(programs, 99, AWAY, "").replace("exit 1", f"touch {run.stop_file}; exit 1"))
    began = time.monotonic()
    assert launched(programs).action is Action.STOP
    assert time.monotonic() - began < 100 and calls(programs) == 1


def test_a_stop_request_ends_the_wait_of_what_comes_before_the_ranks(programs, monkeypatch):
    monkeypatch.setattr(outage_retry, "PAUSES_S", (100.0,))
    run = RunDir(programs / "run")
    run.create()
    write_programs(programs, srun=away(programs, 99, AWAY, "").replace("exit 1", f"echo Ada > {run.stop_file}; exit 1"))
    began = time.monotonic()

    def preflight(number):
        client.heard(run, ["srun", "true"], {}, 60)
        raise AssertionError("ranks are started")

    verdict = supervise(run, preflight, Limits(), Attempt())
    assert time.monotonic() - began < 100 and calls(programs) == 1
    assert (verdict.action, verdict.exit_code, verdict.code) == (Action.STOP, ExitCode.STOPPED, Code.STOPPED)
    assert "stopped by Ada while Slurm's controller was away" in verdict.reason
    assert Attempts(run).all()[-1].verdict == verdict


@pytest.mark.parametrize("said", ["Unable to contact slurm controller (connect failure)", "Socket timed out"])
def test_a_stop_request_ends_the_wait_for_the_requeue(programs, monkeypatch, said):
    monkeypatch.setattr(outage_retry, "PAUSES_S", (100.0,))
    run = ended(programs)
    lines = f"*requeue*) echo x >> {programs}/calls; touch {run.stop_file}; echo '{said}' >&2; exit 1;;"
    write_programs(programs, scontrol=f"case $* in {lines} esac")
    began = time.monotonic()
    assert follow(AGAIN, CONFIG, run, JOB, os.getppid()) == ExitCode.STOPPED
    assert time.monotonic() - began < 100 and calls(programs) == 1
    verdict = Attempts(run).all()[-1].verdict
    assert verdict is not None and verdict.action is Action.STOP, verdict
    assert verdict.reason.startswith(f"{AGAIN.reason}; stopped by STOP file")


def test_what_a_signal_left_does_not_end_the_wait_for_the_requeue(programs):
    run = ended(programs)
    request_stop(run, StopRequest.of_signal(signal.SIGUSR1))
    said = "Unable to contact slurm controller (connect failure)"
    write_programs(programs, scontrol=f'if [ "$1" = requeue ]; then\n{away(programs, 1, said, ":")}\nfi')
    assert requeue.requeue(CONFIG, run, JOB) and calls(programs) == 2


DOES_NOT_REQUEUE = """case $* in
    *requeue*) echo 'Requested operation is presently disabled for job 7' >&2; exit 1;;
    *"show job"*) echo 'JobId=7 JobState=RUNNING Requeue=0 Restarts=0';;
esac"""
AGAIN = RunVerdict(Action.REQUEUE, ExitCode.STOPPED, "stopped by signal SIGUSR1 at step 9")
CONFIG = Config(name="r", launch=LaunchConfig(command=("true",)))


def ended(folder: Path) -> RunDir:
    """A run whose attempt in JOB has ended with AGAIN."""
    run = RunDir(folder / "run")
    run.create()
    number = Attempts(run).begin(Attempt(job=JOB.id, restarts=JOB.restarts))
    Attempts(run).end(number, AGAIN, [])
    return run


def test_a_site_that_does_not_requeue_gets_another_job(programs):
    run = ended(programs)
    (run.path / "job.sbatch").write_text("#!/bin/bash\n")
    write_programs(programs, scontrol=DOES_NOT_REQUEUE)
    write_programs(programs, sbatch=f'echo "$*" > {programs}/submitted; echo 8')
    assert follow(AGAIN, CONFIG, run, JOB, os.getppid()) == ExitCode.STOPPED
    assert str(run.path / "job.sbatch") in (programs / "submitted").read_text()
    [successor] = submissions(run)
    assert (successor.job, successor.replaces) == ("8", "7")
    assert requeue.requeues(Attempts(run).all(), submissions(run), "8") == 0
    assert Attempts(run).all()[-1].verdict == AGAIN, "the run goes on"


def test_an_element_of_an_array_goes_on_in_a_job_of_its_own(programs):
    run = RunDir(programs / "array" / "4")
    run.create()
    element = dataclasses.replace(JOB, id="7_4")
    number = Attempts(run).begin(Attempt(job=element.id))
    Attempts(run).end(number, AGAIN, [])
    write_programs(programs, scontrol=DOES_NOT_REQUEUE)
    write_programs(programs, sbatch=f'echo "$*" > {programs}/submitted; echo 8')
    config = dataclasses.replace(CONFIG, run_dir=str(run.path))
    assert follow(AGAIN, config, run, element, os.getppid()) == ExitCode.STOPPED
    script = run.path / "job.sbatch"
    assert str(script) in (programs / "submitted").read_text()
    assert str(run.run_yaml) in script.read_text() and "--array" not in script.read_text()
    assert [(each.job, each.replaces) for each in submissions(run)] == [("8", "7_4")]


@pytest.mark.parametrize("script", [True, False])
def test_where_nobody_starts_the_run_again_the_verdict_says_so(programs, script, capfd):
    run = ended(programs)
    if script:
        (run.path / "job.sbatch").write_text("#!/bin/bash\n")
    write_programs(programs, scontrol=DOES_NOT_REQUEUE)
    write_programs(programs, sbatch="echo 'sbatch: error: no jobs from compute nodes' >&2; exit 1")
    assert follow(AGAIN, CONFIG, run, JOB, os.getppid()) == ExitCode.STOPPED
    verdict = Attempts(run).all()[-1].verdict
    assert verdict is not None and verdict.action is Action.STOP
    assert verdict.reason.startswith(AGAIN.reason + "; not requeued: ")
    assert ("no jobs from compute nodes" in verdict.reason) is script
    assert "hpctrain resume" in verdict.fix and verdict.reason in capfd.readouterr().err

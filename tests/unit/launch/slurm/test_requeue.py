"""Who ends a job, what follows from that, and when it may be put back into the queue."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpctrain.commands import jobs as slurm_commands
from hpctrain.config.sections import Config, LaunchConfig, MonitorConfig, SlurmConfig
from hpctrain.errors import Code, ExitCode, NoRequeue, RunFailed, UserError
from hpctrain.launch import outage_retry
from hpctrain.launch.engines.jobs import Plan, SubmitOptions, Submitted, record, submissions
from hpctrain.launch.engines.slurm import allocation, client, requeue
from hpctrain.launch.engines.slurm.allocation import skip_steps, unclean
from hpctrain.launch.engines.slurm.job import Job, Who, who_ends
from hpctrain.launch.engines.slurm.submission import submit
from hpctrain.launch.engines.slurm.supervise import (
    LEAVE_S,
    SIGNAL_S,
    amend,
    await_end,
    by_person,
    forget_dead_holder,
    in_view_of,
    lead_s,
    limits,
    make_launch,
)
from hpctrain.launch.engines.slurm.time_limit import TimeLimit
from hpctrain.run import bad_nodes, last_words
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.bad_nodes import BadNode
from hpctrain.run.decision import decide
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, ErrorWord, LastWord
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.run_status import QueueEntry
from hpctrain.run.stop_request import StopRequest, request_stop, requested_stop
from hpctrain.run.verdict import Action, RunVerdict
from tests.support.faults import FileServer
from tests.support.programs import on_path

JOB = Job("7", nodes=2, ranks=4, restarts=1, nodelist="n[1-2]")
PREEMPTED = {"StartTime": "2026-11-21T04:00:00", "PreemptTime": "2026-11-21T05:00:00"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"JobState": "RUNNING", "Reason": "None", "PreemptTime": "None"}, Who.NOBODY),
        (
            {"JobState": "RUNNING", "StartTime": "2026-11-21T04:00:00", "PreemptTime": "2026-11-21T05:00:00"},
            Who.PREEMPTION,
        ),
        ({"JobState": "RUNNING", "StartTime": "2026-11-21T05:10:00", "PreemptTime": "2026-11-21T05:00:00"}, Who.NOBODY),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, Who.LIMIT),
        ({"JobState": "COMPLETING", "Reason": "NodeFail"}, Who.LIMIT),
        ({"JobState": "COMPLETING", "Reason": "None"}, Who.PERSON),
        ({"JobState": "COMPLETING", "Reason": "None", **PREEMPTED, "EndTime": "2026-11-21T05:00:01"}, Who.PREEMPTION),
        ({"JobState": "PREEMPTED", "Reason": "None", **PREEMPTED, "EndTime": "2026-11-21T05:02:00"}, Who.PREEMPTION),
        ({"JobState": "COMPLETING", "Reason": "None", **PREEMPTED, "EndTime": "2026-11-21T05:00:20"}, Who.PERSON),
        ({"JobState": "CANCELLED", "Reason": "None", **PREEMPTED, "EndTime": "2026-11-21T05:00:20"}, Who.PERSON),
        ({"JobState": "CANCELLED", "Reason": "None"}, Who.PERSON),
        ({"JobState": "COMPLETING", "Reason": "None", "Restarts": "2"}, Who.REQUEUE),
        ({"JobState": "COMPLETING", "Reason": "None", "Restarts": "1"}, Who.PERSON),
        ({}, Who.NOBODY),
    ],
)
def test_who_ends_a_job(fields, expected):
    assert who_ends(fields, restarts=1) is expected


@pytest.mark.parametrize(
    ("number", "who", "expected"),
    [("USR1", Who.PERSON, False), ("TERM", Who.PERSON, True), ("TERM", Who.NOBODY, True), ("TERM", Who.REQUEUE, False)],
)
def test_whose_wish_a_signal_tells(monkeypatch, number, who, expected):
    fields = {Who.PERSON: {"JobState": "CANCELLED"}, Who.REQUEUE: {"Restarts": "2"}}.get(who, {})
    monkeypatch.setattr(client, "job_fields", lambda job: fields)
    assert by_person(signal.Signals[f"SIG{number}"], JOB) is expected


STOPPED = RunVerdict(Action.STOP, ExitCode.STOPPED, "stopped by a request at step 9")
KILLED = RunVerdict(
    Action.DO_NOT_REQUEUE, ExitCode.DO_NOT_REQUEUE, "rank 1 on n1 was killed by SIGTERM", rank=1, code=Code.KILLED
)


UNSTARTED = RunVerdict(Action.FAIL, ExitCode.DO_NOT_REQUEUE, "stage-in: srun: error: n2: Killed", before_ranks=True)


@pytest.mark.parametrize(
    ("who", "verdict", "asked", "expected"),
    [
        (Who.REQUEUE, KILLED, None, Action.REQUEUE),
        (Who.REQUEUE, RunVerdict(Action.DONE, ExitCode.DONE, "done"), None, Action.DONE),
        (Who.REQUEUE, RunVerdict(Action.FAIL, ExitCode.USER_ERROR, "no such file"), None, Action.FAIL),
        (Who.REQUEUE, UNSTARTED, None, Action.REQUEUE),
        (Who.PREEMPTION, UNSTARTED, None, Action.REQUEUE),
        (Who.LIMIT, UNSTARTED, None, Action.FAIL),
        (Who.NOBODY, UNSTARTED, None, Action.FAIL),
        (Who.REQUEUE, STOPPED, StopRequest("ann@login"), Action.STOP),
        (Who.PREEMPTION, STOPPED, None, Action.REQUEUE),
        (Who.PREEMPTION, STOPPED, StopRequest.of_signal(signal.SIGTERM), Action.REQUEUE),
        (Who.PREEMPTION, STOPPED, StopRequest("ann@login"), Action.STOP),
        (Who.PREEMPTION, KILLED, None, Action.REQUEUE),
        (Who.LIMIT, KILLED, None, Action.DO_NOT_REQUEUE),
        (Who.NOBODY, STOPPED, None, Action.STOP),
        (Who.PERSON, STOPPED, None, Action.STOP),
    ],
)
def test_what_follows_depends_on_who_ends_the_job(who, verdict, asked, expected):
    assert in_view_of(who, verdict, asked).action is expected


@pytest.mark.parametrize("who", [Who.REQUEUE, Who.PREEMPTION])
def test_what_slurm_did_is_no_failure_and_what_became_of_the_ranks_is_kept(who):
    final = in_view_of(who, KILLED, None)
    assert final.exit_code is ExitCode.STOPPED and final.rank is None
    assert KILLED.reason in final.reason


@pytest.mark.parametrize("code", [Code.NODE, Code.KILLED, Code.VANISHED, Code.HANG, Code.EXCEPTION])
@pytest.mark.parametrize("who", [Who.REQUEUE, Who.PREEMPTION])
def test_steps_that_did_not_end_in_order_are_remembered_where_slurm_ended_them(who, code):
    lost = RunVerdict(Action.REQUEUE, ExitCode.FAILURE, "n2 was lost", host="n2", code=code)
    final = in_view_of(who, lost, None)
    assert unclean([Attempt(1, job="4", verdict=final)], "4") == 1
    assert final.host == ("n2" if code is Code.NODE else None), "a host is named for what it did itself"


def test_an_error_that_comes_again_is_final_though_slurm_preempts_the_job():
    error = ErrorWord("the loss is not finite", "look at the data", "NoRequeue", "", Code.NAN)
    word = LastWord(0, "n1", 1, 1.0, 0.0, Ending.FAILED, 1.0, ExitCode.DO_NOT_REQUEUE, error=error)
    verdict = decide([word], [], max_failures=3)
    assert in_view_of(Who.PREEMPTION, verdict, None) is verdict and verdict.action is not Action.REQUEUE


def test_jobs_that_cannot_be_cancelled_change_nothing(monkeypatch):
    def silent(*_, **__):
        raise RunFailed("scancel did not answer within 60 s", "try again")

    monkeypatch.setattr(client, "cancel", silent)
    requeue.take_out(["5"])


@pytest.mark.parametrize(("job", "cancelled"), [("5", [["6", "7"]]), ("7", []), ("9", [])])
def test_the_end_of_a_chain_takes_out_the_jobs_that_follow(
    tmp_path,
    monkeypatch,
    capsys,
    job,
    cancelled,
):
    taken: list[Sequence[str]] = []
    asked: list[Sequence[str]] = []

    def apart(run, ids):
        asked.append(ids)
        return list(ids), ["job 9 is another cluster's"]

    monkeypatch.setattr(requeue, "apart", apart)
    monkeypatch.setattr(client, "cancel", lambda jobs, pending_only: taken.append(jobs))
    run = RunDir(tmp_path)
    for each in ("5", "6", "7"):
        record(run, Submitted(each, 0.0, "/"))
    requeue.end_chain(run, dataclasses.replace(JOB, id=job))
    assert taken == asked == cancelled
    assert ("job 9 is another cluster's" in capsys.readouterr().err) is bool(asked), "what is left is told"


def test_a_torn_line_hides_no_other_job(tmp_path):
    run = RunDir(tmp_path)
    record(run, Submitted("1", 1.0, "/"))
    with open(tmp_path / "jobs.jsonl", "a") as file:
        file.write('{"job": "2", "ti')
    record(run, Submitted("3", 3.0, "/"))
    assert [each.job for each in submissions(run)] == ["1", "3"]


def attempts(*jobs: str) -> list[Attempt]:
    return [Attempt(number, job=job) for number, job in enumerate(jobs, 1)]


@pytest.mark.parametrize(
    ("jobs", "replaces", "expected"),
    [
        (["7"], {}, 0),
        (["7", "7", "7"], {}, 2),
        (["6", "6", "7"], {}, 0),
        (["6", "6", "7"], {"7": "6"}, 2),
        (["5", "6", "7", "7"], {"7": "6", "6": "5"}, 3),
        ([], {}, 0),
        (["6", "7"], {"7": "6", "6": "7"}, 1),
        (["7"], {"7": "7"}, 0),
    ],
)
def test_requeues_of_a_submission(jobs, replaces, expected):
    known = [Submitted(job, 0.0, "/", replaces=replaces.get(job)) for job in dict.fromkeys(jobs)]
    assert requeue.requeues(attempts(*jobs), known, "7") == expected


def test_attempts_in_place_are_one_start_of_the_job():
    made = [Attempt(number=number, job="7", restarts=restarts) for number, restarts in ((1, 0), (2, 0), (3, 0), (4, 1))]
    assert requeue.requeues(made, [Submitted("7", 0.0, "/")], "7") == 1


def unwritable(folder: Path) -> RunDir:
    """A run whose jobs cannot be recorded."""
    run = RunDir(folder / "run")
    run.create()
    (run.path / "jobs.jsonl").mkdir()
    return run


def test_a_job_that_cannot_be_recorded_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(client, "submit", lambda script, options: "4711")
    config = Config(name="r", launch=LaunchConfig(command=("true",)))
    assert submit(Plan(config, unwritable(tmp_path), "")) == ["4711"]
    said = capsys.readouterr().err
    assert "job 4711 cannot be recorded in" in said and "scancel 4711" in said


def test_a_job_in_place_of_this_one_that_cannot_be_recorded_was_submitted_all_the_same(tmp_path, monkeypatch, capsys):
    run = unwritable(tmp_path)
    (run.path / "job.sbatch").touch()
    bad_nodes.of_run(run).add(BadNode("n2", time.time() + 99, 1, "slow"))
    monkeypatch.setattr(client, "job_fields", lambda job: {})
    monkeypatch.setattr(client, "submit", lambda script, options: "4711")
    monkeypatch.setattr(requeue, "submissions", lambda run, engine: [])
    config = Config(
        name="r", launch=LaunchConfig(command=("true",)), monitor=MonitorConfig(action="exclude_on_requeue")
    )
    assert requeue.requeue(config, run, JOB) is False
    assert "scancel 4711" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cluster", "states", "removed"),
    [
        ("here", ["COMPLETED"], True),
        ("elsewhere", ["COMPLETED"], False),
        ("here", ["RUNNING"], False),
        ("here", [], False),  # filtered, or hidden as another user's: that is not the end of the job
    ],
)
def test_only_the_lock_of_a_job_of_this_cluster_that_is_shown_as_ended_is_released(
    tmp_path, monkeypatch, cluster, states, removed
):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", cluster)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = RunDir(tmp_path)
    LiveLock(run, myself()).acquire()
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(client, "queue", lambda ids, timeout_s=0.0: [QueueEntry("7", state) for state in states])
    forget_dead_holder(run)
    assert run.lock_file.exists() is not removed


def test_of_a_chain_that_slurm_takes_in_part_the_jobs_are_told(tmp_path, monkeypatch):
    def sbatch(script, options):
        if len(submissions(run)) == 2:
            raise RunFailed("sbatch refused: QOSMaxSubmitJobPerUserLimit", "ask the site")
        return f"{len(submissions(run)) + 1}"

    run = RunDir(tmp_path)
    monkeypatch.setattr(client, "submit", sbatch)
    with pytest.raises(RunFailed, match="UserLimit; before that job 1, 2 was submitted") as caught:
        submit(Plan(Config(name="r", launch=LaunchConfig(command=("true",))), run, "", options=SubmitOptions(chain=4)))
    assert "hpctrain cancel" in caught.value.fix


def test_a_node_to_leave_out_that_slurm_does_not_know_does_not_keep_a_run_from_starting(tmp_path, monkeypatch, capsys):
    """The list that a user's runs share may name nodes of another cluster."""

    def sbatch(script, options):
        if "--exclude=n9" in options:
            raise RunFailed("sbatch refused: Batch job submission failed: Invalid node name specified", "see")
        return str(len(submissions(run)) + 1)

    run = RunDir(tmp_path)
    monkeypatch.setattr(client, "submit", sbatch)
    planned = Plan(Config(name="r", launch=LaunchConfig(command=("true",))), run, "", options=SubmitOptions(chain=2))
    assert submit(planned, always=["--exclude=n9"]) == ["1", "2"]
    assert "without --exclude=n9: sbatch refused" in capsys.readouterr().err


def test_a_job_that_cannot_be_recorded_by_itself_starts_all_the_same(tmp_path, monkeypatch, capsys):
    def prepare(*_):
        raise NoRequeue("as far as this", "")

    monkeypatch.setattr(allocation, "prepare", prepare)
    monkeypatch.setattr("hpctrain.launch.engines.slurm.supervise.submissions", lambda run, engine: [])
    with pytest.raises(NoRequeue, match="as far as this"):
        run = unwritable(tmp_path)
        make_launch(with_cap(1), run, allocation.JobNodes(with_cap(1), run, JOB, JOB), 1, False)
    assert "job 7 cannot be recorded in" in capsys.readouterr().err


@pytest.fixture
def run_after(tmp_path: Path) -> Callable[[Sequence[RunVerdict | None]], RunDir]:
    """``run_after(verdicts)`` is a run whose job 7 has ended with these; with None nobody wrote one."""

    def make(verdicts: Sequence[RunVerdict | None]) -> RunDir:
        run = RunDir(tmp_path / "run")
        run.create()
        record(run, Submitted("7", 0.0, "/"))
        for restarts, verdict in enumerate(verdicts, JOB.restarts + 1 - len(verdicts)):
            number = Attempts(run).begin(Attempt(job="7", restarts=restarts))
            if verdict is not None:
                Attempts(run).end(number, verdict, [])
        return run

    return make


def with_cap(number: int) -> Config:
    return Config(name="r", launch=LaunchConfig(command=("true",), slurm=SlurmConfig(max_requeues=number)))


STOP = RunVerdict(Action.STOP, ExitCode.STOPPED, "stopped by signal SIGTERM")
AGAIN = RunVerdict(Action.REQUEUE, ExitCode.FAILURE, "rank 1 died")


@pytest.mark.parametrize(("job", "has_script"), [("7_4", True), ("7_5", False), ("7", False)])
def test_an_element_of_an_array_gets_a_script_for_itself_and_no_other_job_does(tmp_path, job, has_script):
    run = RunDir(tmp_path / "4")
    run.create()
    assert requeue.has_script(with_cap(9), run, dataclasses.replace(JOB, id=job)) is has_script
    assert (run.path / "job.sbatch").exists() is has_script


@pytest.mark.parametrize("between", [STOP, AGAIN, None])
def test_the_cap_holds_whoever_requeued_the_job_in_between(
    run_after,
    monkeypatch,
    between,
):
    requeued: list[str] = []
    monkeypatch.setattr(client, "job_fields", lambda job: {"JobState": "RUNNING"})
    monkeypatch.setattr(client, "requeue", requeued.append)
    run = run_after([AGAIN, between, AGAIN])
    (run.path / "job.sbatch").touch()  # is not submitted again: no node is to be left out
    with pytest.raises(NoRequeue, match="max_requeues 2 is used up"):
        requeue.requeue(with_cap(2), run, JOB)
    assert not requeued
    assert requeue.requeue(with_cap(3), run, JOB)
    assert requeued == ["7"]


def test_a_cancelled_job_is_never_requeued(run_after, monkeypatch):
    monkeypatch.setattr(client, "job_fields", lambda job: {"JobState": "COMPLETING", "Reason": "None"})
    with pytest.raises(requeue.Cancelled, match="cancelled"):
        requeue.requeue(with_cap(9), run_after([AGAIN]), JOB)


def test_a_job_in_place_of_this_one_learns_nothing_of_it(tmp_path, monkeypatch):
    on_path(tmp_path, monkeypatch, sbatch=f'echo "$SLURM_RESTART_COUNT $SLURM_CONF" > {tmp_path}/told; echo 8')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    monkeypatch.setenv("SLURM_CONF", "c")
    assert client.submit(Path("job.sbatch")) == "8"
    assert (tmp_path / "told").read_text().split() == ["c"]


def test_another_verdict_stands_in_both_places(run_after):
    run = run_after([AGAIN])
    amend(run, JOB, STOP)
    words = last_words.read(run, 1)
    assert words is not None and Attempts(run).all()[-1].verdict == words.verdict == STOP


def test_steps_are_used_up(tmp_path, monkeypatch):
    on_path(tmp_path, monkeypatch, srun=f'echo "$*" >> {tmp_path}/steps')
    skip_steps(RunDir(tmp_path), 3)
    steps = (tmp_path / "steps").read_text().splitlines()
    assert len(steps) == 3 and all("--mpi=none" in step and step.endswith(" true") for step in steps)


LATE_SIGNAL = """
import os, signal, sys
from hpctrain.launch.engines.slurm import client, supervise
from hpctrain.run.verdict import Action, RunVerdict
verdict = RunVerdict(Action.REQUEUE, 70, "rank 1 died")
supervise.supervise = lambda *_, **__: verdict
client.job_fields = lambda job: {}
supervise.follow = lambda *_: os.kill(os.getpid(), signal.Signals[sys.argv[2]]) or 70
sys.exit(supervise.supervise_job(sys.argv[1]))
"""


def test_ranks_get_the_time_that_the_job_script_promised(tmp_path, monkeypatch):
    config, run = Config(name="r", launch=LaunchConfig(command=("sh",))), RunDir(tmp_path)
    monkeypatch.setenv(SIGNAL_S, "300")
    assert limits(config, TimeLimit("7", lead_s(config, run))).stop_grace_s == 270
    monkeypatch.delenv(SIGNAL_S)  # a script of the user's own
    launch = LaunchConfig(command=("sh",), slurm=SlurmConfig(signal_s=200))
    assert lead_s(dataclasses.replace(config, launch=launch), run) == 200


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_slurms_signals_at_the_time_limit_do_not_end_a_requeue(tmp_path, name):
    (tmp_path / "run.yaml").write_text(f'name: r\nrun_dir: {tmp_path}/run\nlaunch: {{command: ["true"]}}\n')
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1"}
    words = [sys.executable, "-c", LATE_SIGNAL, str(tmp_path / "run.yaml"), name]
    assert subprocess.run(words, env={**os.environ, **job}, timeout=60, check=False).returncode == 70


def test_a_command_of_slurm_that_the_job_s_own_end_killed_is_asked_again(tmp_path, monkeypatch):
    on_path(tmp_path, monkeypatch, scontrol="kill -TERM $$")
    with pytest.raises(client.Unanswered):
        client.requeue("7")


def test_a_supervisor_that_slurm_ends_does_not_wait_to_be_killed():
    began = time.monotonic()
    await_end(os.getppid(), [signal.SIGUSR1, signal.SIGTERM])
    assert time.monotonic() - began < LEAVE_S / 2


def test_a_supervisor_whose_daemon_has_died_does_not_wait_to_be_ended():
    began = time.monotonic()
    await_end(parent=-1)
    assert time.monotonic() - began < LEAVE_S


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("Unable to contact slurm controller", 3),
        ("Unexpected message received for job 7", 3),
        ("Access/permission denied", 1),
    ],
)
def test_a_controller_that_restarts_is_asked_again(
    run_after,
    tmp_path,
    monkeypatch,
    said,
    calls,
):
    count = f"echo x >> {tmp_path}/calls; [ $(wc -l < {tmp_path}/calls) -ge 3 ]"
    on_path(tmp_path, monkeypatch, scontrol=f"{count} || {{ echo '{said}'; exit 1; }}")
    monkeypatch.setattr(client, "job_fields", lambda job: {})
    monkeypatch.setattr(outage_retry, "PAUSES_S", (0.0, 0.0))
    if calls == 3:
        assert requeue.requeue(with_cap(9), run_after([AGAIN]), JOB)
    else:
        with pytest.raises(RunFailed, match=said):
            requeue.requeue(with_cap(9), run_after([AGAIN]), JOB)
    assert (tmp_path / "calls").read_text().count("x") == calls


def test_a_site_that_forbids_requeue(run_after, monkeypatch):
    monkeypatch.setattr(client, "job_fields", lambda job: {})
    forbidden = Config(name="r", launch=LaunchConfig(command=("true",), slurm=SlurmConfig(requeue=False)))
    with pytest.raises(UserError, match="requeue is false"):
        requeue.requeue(forbidden, run_after([AGAIN]), JOB)


def test_steps_may_lie_around_after_attempts_that_did_not_end_in_order():
    past = [
        Attempt(1, job="7", verdict=AGAIN),
        Attempt(2, job="7", verdict=STOP),
        Attempt(3, job="7"),
        Attempt(4, job="6"),
    ]
    assert unclean(past, "7") == 2
    assert unclean([], "7") == 0


BUSY = "case $* in *show*) echo 'JobState=RUNNING Restarts=1';; "


def test_a_controller_under_load_is_asked_again(run_after, tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    once = f"*) [ -e {asked} ] && exit; touch {asked}; echo 'Socket timed out on send/recv' >&2; exit 1;; esac"
    on_path(tmp_path, monkeypatch, scontrol=BUSY + once)
    monkeypatch.setattr(outage_retry, "PAUSES_S", (0.0,))
    assert requeue.requeue(with_cap(3), run_after([AGAIN]), JOB)


def test_what_an_unanswered_question_did_is_not_asked_for_again(run_after, monkeypatch):
    asked: list[str] = []

    def silent(job):
        asked.append(job)
        raise client.Unanswered("scontrol did not answer within 60 s", "")

    monkeypatch.setattr(client, "job_fields", lambda job: {"JobState": "RUNNING", "Restarts": str(1 + len(asked))})
    monkeypatch.setattr(client, "requeue", silent)
    monkeypatch.setattr(outage_retry, "PAUSES_S", (0.0,))
    assert requeue.requeue(with_cap(3), run_after([AGAIN]), JOB) and len(asked) == 1


def test_a_run_folder_that_may_not_be_read_any_more_is_said(run_after, monkeypatch):
    run = run_after([AGAIN])
    monkeypatch.setattr(client, "job_fields", lambda job: {})
    FileServer(errno.EKEYEXPIRED, "run.json", "open", 1000).install(monkeypatch)
    with pytest.raises(RunFailed, match=r"run\.json cannot be used"):
        requeue.requeue(with_cap(3), run, JOB)


@pytest.mark.parametrize("refusal", ["Invalid node name specified", "Requested node configuration is not available"])
def test_a_host_that_cannot_be_left_out_does_not_end_the_run(
    run_after,
    tmp_path,
    monkeypatch,
    refusal,
):
    run = run_after([AGAIN])
    (run.path / "job.sbatch").touch()
    bad_nodes.of_run(run).add(BadNode("n2.cluster.local", time.time() + 99, 1, "slow"))
    on_path(
        tmp_path,
        monkeypatch,
        scontrol=BUSY + f"*) touch {tmp_path}/requeued;; esac",
        sbatch=f"echo $* > {tmp_path}/options; echo {refusal} >&2; exit 1",
    )
    config = dataclasses.replace(with_cap(9), monitor=MonitorConfig(action="exclude_on_requeue"))
    assert requeue.requeue(config, run, JOB) and (tmp_path / "requeued").exists()
    assert "--exclude=n2 " in (tmp_path / "options").read_text()


@pytest.mark.parametrize("who", [Who.NOBODY, Who.LIMIT, Who.REQUEUE])
def test_a_person_who_asks_while_the_ranks_save_for_slurm_is_heard(tmp_path, who):
    run = RunDir(tmp_path)
    request_stop(run, StopRequest.of_signal(signal.SIGUSR1))
    request_stop(run, StopRequest("ann@login"))
    request_stop(run, StopRequest.of_signal(signal.SIGTERM))
    verdict = RunVerdict(Action.REQUEUE, ExitCode.STOPPED, "stopped by signal SIGUSR1 at step 9")
    assert in_view_of(who, verdict, requested_stop(run)).action is Action.STOP


@pytest.mark.parametrize("said", ["8", "8;cluster", "----\n Welcome to Stampede3\n--> Verifying...OK\n8"])
def test_a_job_is_known_by_its_number_whatever_the_site_says_before(tmp_path, monkeypatch, said):
    (tmp_path / "said").write_text(said)
    on_path(tmp_path, monkeypatch, sbatch=f"cat {tmp_path}/said")
    assert client.submit(Path("job.sbatch")) == "8"


def test_lines_that_are_no_jobs_and_times_as_a_person_likes_them(tmp_path, monkeypatch):
    line = "7|7|N/A|RUNNING|1:00|1:00|2:00|n1|2026-01-01T00:00:00|None"
    on_path(tmp_path, monkeypatch, squeue=f"echo 'as of a minute ago'; echo '{line}'",
               scontrol="echo StartTime=$SLURM_TIME_FORMAT WorkDir=$'/home/j\\xf6rg'")  # fmt: skip
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert [entry.id for entry in client.queue(["7"])] == ["7"]
    assert client.job_fields("7")["StartTime"] == "standard"


def test_the_end_of_a_chain_is_that_of_the_job_that_ran_last(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.create()
    for place, job in enumerate(("5", "6", "7")):
        record(run, Submitted(job, 0.0, "/", place))
    Attempts(run).begin(Attempt(job="5"))
    states = {"5": "COMPLETED", "6": "CANCELLED", "7": "CANCELLED"}
    entries = {job: QueueEntry(job, state, "", "", "", "", "", "") for job, state in states.items()}
    monkeypatch.setattr(client, "queue", lambda ids, timeout_s=0.0: [entries[job] for job in ids])
    assert slurm_commands._wait(run) == ExitCode.DONE
    record(run, Submitted("8", 0.0, "/"))  # cancelled before it ran
    entries["8"] = dataclasses.replace(entries["7"], id="8")
    assert slurm_commands._wait(run) == ExitCode.FAILURE


def test_an_element_that_the_queue_has_forgotten_counts(tmp_path, monkeypatch):
    array = RunDir(tmp_path)
    record(array, Submitted("7", 0.0, "/"))
    for index in ("0", "1"):
        element = RunDir(tmp_path / index)
        element.create()
        element.run_yaml.touch()
        record(element, Submitted(f"7_{index}", 0.0, "/"))
    entry = QueueEntry("7_1", "COMPLETED", "", "", "", "", "", "")
    monkeypatch.setattr(client, "queue", lambda ids, timeout_s=0.0: [entry])
    monkeypatch.setattr(
        client, "accounted", lambda ids, timeout_s: [dataclasses.replace(entry, id=job, state="FAILED") for job in ids]
    )
    assert slurm_commands._wait(array) == ExitCode.FAILURE

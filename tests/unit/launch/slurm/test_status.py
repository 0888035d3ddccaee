"""Status, submissions and logs: what is known, and what is not guessed."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.commands import jobs as slurm_commands
from hpctrain.errors import ExitCode, RunFailed, UserError
from hpctrain.launch.engines import jobs, schedulers, status
from hpctrain.launch.engines.slurm import client, submission
from hpctrain.launch.engines.status import RunStatus
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.events import decode
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.progress import Progress
from hpctrain.run.run_status import QueueEntry, RunSnapshot, RunState, Word
from hpctrain.run.verdict import Action, RunVerdict
from tests.support.programs import on_path, write_programs


def event(name: str, step: int, time: float = 0.0, **fields: Any) -> dict[str, Any]:
    """An event of attempt 1."""
    return {"event": name, "step": step, "time": time, "attempt": 1, **fields}


def found(*events: dict[str, Any], attempts: Sequence[dict[str, Any]] = (), **fields: Any) -> RunSnapshot:
    made = Progress()
    for each in decode("\n".join(map(json.dumps, events)).encode()):
        made.add(each)
    return RunSnapshot(Path("run"), "id", {}, tuple(map(Attempt.from_json, attempts)), made, **fields)


def of(run: RunSnapshot, word: Word = Word.RUNNING, job: str = "", job_state: str = "", now: float = 0.0) -> RunStatus:
    return RunStatus(run, RunState(word), QueueEntry(job, job_state, "", "", "", "", "n1" if job else "", ""), now)


SQUEUE = """\
[ -n "$SECONDS_TO_ANSWER" ] && exec sleep "$SECONDS_TO_ANSWER"
for word in "$@"; do case "$word" in --jobs=*) ids=${{word#--jobs=}};; esac; done
[ -n "$ids" ] || exit 0
echo "$ids" >> {folder}/asked
grep -E "^[0-9]+\\|($(echo "$ids" | sed "s/_[0-9]*//g" | tr , "|"))\\|" {folder}/queue && exit 0
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
"""
RECORDED = """\
2|2|1|PENDING|0:00|UNLIMITED|UNLIMITED||N/A|JobArrayTaskLimit
2|2|5|PENDING|0:00|UNLIMITED|UNLIMITED||N/A|JobArrayTaskLimit
3|2|0|RUNNING|0:14|364-23:59:46|365-00:00:00|n2|2026-11-22T04:02:29|None
1|1|N/A|COMPLETED|0:00|365-00:00:00|365-00:00:00|n1|2026-11-22T04:02:29|None
9|9|N/A|PENDING|0:00|UNLIMITED|UNLIMITED||N/A|DependencyNeverSatisfied
10|10|N/A|CANCELLED|0:00|UNLIMITED|UNLIMITED||2026-11-22T04:02:43|DependencyNeverSatisfied
11|11|N/A|PENDING|0:00|UNLIMITED|UNLIMITED||N/A|PartitionNodeLimit
12|12|N/A|TIMEOUT|1:00|0:00|1:00|n1|2026-11-22T04:02:29|TimeLimit
13|13|N/A|FAILED|0:01|0:59|1:00|n1|2026-11-22T04:02:29|NonZeroExitCode
"""
"""What squeue of Slurm 22.05 said; elements 2, 3 and 4 of the array had been cancelled while they waited."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a squeue that knows what was recorded, and nothing else of Slurm."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "queue").write_text(RECORDED)
    on_path(folder, monkeypatch, squeue=SQUEUE.format(folder=folder))
    monkeypatch.setenv("SECONDS_TO_ANSWER", "")
    if shutil.which("sacct"):
        monkeypatch.setattr(client, "accounted", lambda ids, timeout_s=0.0: [])
    return folder


def submitted(folder: Path, job: str) -> RunDir:
    run = RunDir(folder)
    run.create()
    run.run_yaml.write_text(f"name: {folder.name}\nlaunch: {{command: [sh]}}\nrun_dir: {folder}\n")
    jobs.record(run, jobs.Submitted(job, 0.0, "/"))
    return run


def conclude(run: RunDir, action: Action, reason: str) -> None:
    code = ExitCode.DONE if action is Action.DONE else ExitCode.FAILURE
    Attempts(run).end(Attempts(run).begin(), RunVerdict(action, code, reason), [])


TRAIN = event("train", 30, 100.0, loss=0.5, samples_per_s=640.0, steps=10, seconds={"forward": 1.0, "backward": 4.0})
STARTED = event("run_started", 0, 0.0, total_steps=100)


def test_progress_from_events():
    made = of(found(STARTED, TRAIN, attempts=[{"attempt": 1}], checkpoint_step=24), now=107.0).plain()["progress"]
    assert [made[key] for key in ("attempt", "step", "steps", "checkpoint", "silent_s")] == [1, 30, 100, 24, 7.0]
    assert made["left_s"] == pytest.approx(35.0), "70 steps at 2 steps a second"
    assert made["ended"] is None


def test_an_empty_folder_is_no_error():
    made = of(found(), Word.NOT_STARTED)
    assert [made.plain()["progress"][key] for key in ("attempt", "step", "left_s")] == [None] * 3
    assert status.lines([made]) == ["run", "  not started", "  no attempt yet · no step yet"]


def test_the_end_is_in_the_verdicts_words():
    verdict = {"action": "requeue", "exit_code": 70, "reason": "rank 3 on n2 was killed"}
    made = of(found(TRAIN, attempts=[{"attempt": 2, "ended": 5.0, "verdict": verdict}]), Word.FAILED, "7", "FAILED")
    assert made.plain()["progress"]["ended"] == "rank 3 on n2 was killed"
    text = "\n".join(status.lines([made]))
    assert "last attempt: rank 3 on n2 was killed" in text and "to go" not in text


def test_a_rate_is_told_as_watch_tells_it_and_a_program_without_steps_has_none():
    fast = of(found(event("train", 30, 100.0, loss=0.5, samples_per_s=15727.4, steps=10, seconds={})), Word.RUNNING)
    assert "15,727 samples/s" in "\n".join(status.lines([fast]))
    measured = {"loss": 0.5, "learning_rate": 1.5e-4, "accuracy": 0.25}
    made = of(found(event("train", 30, 100.0, steps=10, seconds={}, **measured)), Word.RUNNING)
    assert "loss 0.5 · accuracy 0.25 · lr 0.00015" in "\n".join(status.lines([made]))
    assert made.plain()["progress"]["metrics"] == {"accuracy": 0.25}
    verdict = {"action": "done", "exit_code": 0, "reason": "done"}
    program = of(found(attempts=[{"attempt": 2, "ended": 5.0, "verdict": verdict}]), Word.FINISHED)
    assert "no step yet" not in "\n".join(status.lines([program]))


def test_that_nothing_is_saved_is_shown():
    made = of(found(event("checkpoint_failed", 9, failures=4, error="disk full")), Word.RUNNING, "7", "RUNNING")
    text = "\n".join(status.lines([made]))
    assert "NOT SAVED: 4 checkpoints in a row failed, the last at step 9; there is none: disk full" in text


def test_that_the_store_is_away_is_shown():
    made = of(found(event("store_away", 9, path="s3://b/x", error="SlowDown")), Word.RUNNING, "7", "RUNNING")
    text = "\n".join(status.lines([made]))
    assert "NOT STORED: checkpoints do not reach s3://b/x; none has been sent: SlowDown" in text


def test_a_forgotten_job_is_unknown(tmp_path, slurm):
    [made] = status.of_runs([submitted(tmp_path / "r", "999")])
    assert (made.state.word, made.job.id, made.job.state) == (Word.UNKNOWN, "999", "UNKNOWN")
    assert "forgotten" in made.state.why


@pytest.mark.parametrize(
    ("job", "state", "why"),
    [
        ("9", "pending", "job 9 waits (DependencyNeverSatisfied)"),
        ("10", "cancelled", "job 10 is CANCELLED (DependencyNeverSatisfied), before it wrote anything"),
        ("11", "pending", "job 11 waits (PartitionNodeLimit)"),
        ("12", "failed", "job 12 is TIMEOUT (TimeLimit), before it wrote anything"),
        ("2_0", "running", "starting"),
        ("2_3", "cancelled", "job 2_3 is CANCELLED (taken out of the queue), before it wrote anything"),
    ],
)
def test_what_slurm_says_of_runs_that_have_said_nothing(tmp_path, slurm, job, state, why):
    [made] = status.of_runs([submitted(tmp_path / "r", job)])
    assert (made.state.word, made.state.why) == (state, why if state != "running" else made.state.why)


@pytest.mark.parametrize("job", ["12", "10", "2_3", "999"])
def test_how_a_run_has_ended_is_not_what_became_of_its_job(tmp_path, slurm, cli, job):
    run = submitted(tmp_path / "r", job)
    conclude(run, Action.DONE, "done after step 9")
    said = cli("status", run.path).out
    assert "  finished: done after step 9" in said
    assert not any(word in said for word in ("TIMEOUT", "CANCELLED", "UNKNOWN"))


def test_an_element_of_an_array_that_ran_is_not_called_cancelled(tmp_path, slurm):
    run = submitted(tmp_path / "3", "2_3")
    Attempts(run).begin()
    [made] = status.of_runs([run])
    assert made.job.state == "UNKNOWN", "elements that ended long ago are forgotten, too"


def test_a_silent_controller_delays_what_the_folder_knows_by_seconds(tmp_path, slurm, monkeypatch, cli):
    run = submitted(tmp_path / "r", "12")
    Attempts(run).begin()
    monkeypatch.setenv("SECONDS_TO_ANSWER", "60")
    assert client.ANSWER_S <= 5
    monkeypatch.setattr(client, "ANSWER_S", 0.3)
    begin = time.monotonic()
    said = cli("status", run.path).out
    assert time.monotonic() - begin < 60
    assert "job 12 UNKNOWN" in said and "attempt 1" in said


def test_all_runs_are_listed(tmp_path, slurm, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    conclude(submitted(tmp_path / "runs" / "one", "12"), Action.DONE, "done after step 9")
    for index in (0, 3):
        submitted(tmp_path / "runs" / "many" / str(index), f"2_{index}")
    (tmp_path / "runs" / "many" / "run.yaml").write_text("name: many\n")
    elsewhere = submitted(tmp_path / "a|b é%j", "9")
    scripts = {"9": ("PENDING", f"{elsewhere.path}/job.sbatch"), "8": ("RUNNING", "/x/other.sh")}
    monkeypatch.setattr(client, "own_scripts", lambda timeout_s=0.0: scripts)
    lines = [line.split() for line in cli("status").out.splitlines()]
    assert [line[:2] for line in lines] == [
        ["running", "2_0"], ["cancelled", "2_3"], ["finished", "12"], ["pending", "9"],
    ]  # fmt: skip
    assert [each["state"] for each in json.loads(cli("status", "--json").out)][-1] == "pending"


def test_own_scripts_are_squeues(tmp_path, monkeypatch):
    on_path(tmp_path, monkeypatch, squeue="printf '2_1|RUNNING|/w/a|b/job.sbatch\\n6|PENDING|(null)\\n'")
    assert client.own_scripts() == {"2_1": ("RUNNING", "/w/a|b/job.sbatch"), "6": ("PENDING", "(null)")}


def explained(cli: Callable[..., Any], *words: object) -> str:
    return " ".join(cli("explain", *words).out.split())


@pytest.mark.parametrize(
    ("job", "cause", "said"),
    [
        ("9", "pending", "The run has not begun. Job 9 waits (DependencyNeverSatisfied). A job that it waits"),
        ("10", "cancelled", "The run's job was cancelled. Job 10 is CANCELLED (DependencyNeverSatisfied)"),
        ("11", "pending", "lower launch.nodes"),
        ("2_0", "running", "The run continues"),
        ("12", "time_limit", "Job 12 is TIMEOUT"),
        ("999", "unknown", "Job 999: Slurm has forgotten it"),
    ],
)
def test_runs_that_left_nothing_are_explained_by_their_jobs(tmp_path, slurm, cli, job, cause, said):
    run = submitted(tmp_path / "r", job)
    assert said in explained(cli, run.path)
    assert json.loads(explained(cli, "--json", run.path))["cause"] == cause


@pytest.mark.parametrize(("job", "said"), [("12", "Job 12 is TIMEOUT"), ("3", "The run hangs")])
def test_a_run_that_a_user_s_own_job_started_is_explained_by_that_job_once_it_has_ended(
    tmp_path,
    slurm,
    cli,
    monkeypatch,
    job,
    said,
):
    """A script that calls mpirun; job 3 still runs."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    run = RunDir(tmp_path / "r")
    run.create()
    run.run_yaml.write_text("name: r\ntask: wave.py:task\n")
    Attempts(run).begin()
    run.monitor_events.parent.mkdir(exist_ok=True)
    run.monitor_events.write_text(json.dumps(event("hang", 30, 100.0, kind="died")) + "\n")
    assert said in explained(cli, run.path)


def test_an_array_is_explained_in_as_few_sentences_as_it_has_ends(tmp_path, slurm, cli):
    for index in range(6):
        submitted(tmp_path / "many" / str(index), f"2_{index}")
    said = explained(cli, tmp_path / "many")
    assert "2, 3, 4: The run's job was cancelled" not in said, "each has a number of its own"
    assert "0: The run continues" in said and "3: The run's job was cancelled" in said
    assert len(json.loads(explained(cli, "--json", tmp_path / "many"))) == 6
    for index in range(6):
        conclude(RunDir(tmp_path / "many" / str(index)), Action.DONE, "done")
    assert explained(cli, tmp_path / "many").startswith("0, 1, 2, 3, 4, 5: The run completed.")


def test_a_refused_job_is_explained(tmp_path, slurm, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("name: r\nlaunch: {command: [sh]}\n")
    error = "sbatch: error: Batch job submission failed: Invalid partition name specified"
    write_programs(slurm, sbatch=f"echo '{error}' >&2\nexit 1")
    cli("submit", "r.yaml", code=ExitCode.FAILURE)
    said = explained(cli, "r.yaml")
    assert "The run was not started. Sbatch refused: " in said and "Invalid partition name specified" in said
    assert said.endswith("Set launch.slurm.partition to one that sinfo lists.")
    assert "not started: sbatch refused: " in cli("status", "r.yaml").out
    write_programs(slurm, sbatch="echo 9")
    cli("submit", "r.yaml")
    assert "Job 9 waits" in explained(cli, "r.yaml")


def test_a_failed_run_that_is_to_go_on_says_so(tmp_path, slurm, cli):
    run = submitted(tmp_path / "r", "11")
    conclude(run, Action.REQUEUE, "rank 3 on n2 was killed")
    said = explained(cli, run.path)
    assert "rank 3 on n2 was killed" in said and "It will resume: job 11 waits (PartitionNodeLimit)" in said


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ("999999", "Slurm does not know this job"),
        ("13", "that job is FAILED"),
        ("10", "CANCELLED"),
        ("-x", "is not a job"),
    ],
)
def test_a_job_that_waits_in_vain_or_not_at_all_is_not_submitted(
    tmp_path,
    slurm,
    monkeypatch,
    cli,
    job,
    what,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("name: r\nlaunch: {command: [sh]}\n")
    write_programs(slurm, sbatch=f"echo yes > {slurm}/submitted\necho 77")
    assert (
        what in cli("submit", f"--after={job}", "r.yaml", code=ExitCode.USER_ERROR).err
        and not (slurm / "submitted").exists()
    )
    for good in ("1", "2", "2_0", "9"):
        submission.check_after([good])


def test_a_finished_run_is_not_resumed(tmp_path, slurm, cli):
    run = submitted(tmp_path / "r", "12")
    conclude(run, Action.DONE, "done after step 9")
    write_programs(slurm, sbatch="echo 77")
    assert "has finished: done after step 9" in cli("resume", run.path, code=ExitCode.USER_ERROR).err
    assert status.jobs_of(run) == ["12"]
    cli("resume", run.path, "--train.epochs", "7")
    assert status.jobs_of(run) == ["12", "77"]


def test_without_slurm_the_folder_speaks(tmp_path, monkeypatch, cli):
    run = RunDir(tmp_path)
    Attempts(run).begin()
    jobs.record(run, jobs.Submitted("12", 0.0, "/"))
    monkeypatch.setenv("PATH", "")
    said = cli("status", tmp_path).out
    assert "job 12 UNKNOWN" in said and "squeue is not on PATH" in said and "attempt 1" in said


def test_a_folder_of_somebody_else_is_not_asked_to_stop(tmp_path):
    with pytest.raises(UserError, match="STOP cannot be made"):
        slurm_commands.request_stop(RunDir(tmp_path / "missing"))


def test_slurm_is_asked_once_for_all_elements_of_an_array(tmp_path, slurm):
    found = status.of_runs([submitted(tmp_path / str(index), f"2_{index}") for index in (0, 1, 3)])
    assert [each.state.word for each in found] == ["running", "pending", "cancelled"]
    assert (slurm / "asked").read_text().splitlines() == ["2"], "one word for thousands of elements"


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_slurm_is_asked_once_about_an_array_that_is_to_end(tmp_path, slurm, command, monkeypatch, cli):
    ended: list[list[str]] = []
    for index in (0, 1, 3):
        submitted(tmp_path / "array" / str(index), f"2_{index}")
    monkeypatch.setattr(client, "find", lambda name: name)
    monkeypatch.setattr(client, "cancel", lambda jobs: ended.append(list(jobs)))
    monkeypatch.setattr(client, "origin", lambda job: client.Origin("r", f"{tmp_path}/array/job.sbatch", "/", ""))
    said = cli(command, tmp_path / "array").out
    assert (slurm / "asked").read_text().splitlines() == ["2_0,2_1,2_3"]
    assert ended == [["2_0", "2_1"]] and "2_1" in said


def test_the_living_job_is_shown_before_the_newest(tmp_path, slurm):
    run = submitted(tmp_path, "9")
    jobs.record(run, jobs.Submitted("10", 0.0, "/"))
    found = status.ask([run]).job_of(run)
    assert found is not None and found.id == "9"


def test_lines_of_squeue():
    entry = client.parse_queue("15|12|3|PENDING|0:00|1:00|1:00||N/A|Resources|or not\n")
    assert (entry.id, entry.state, entry.reason) == ("12_3", "PENDING", "Resources|or not")
    assert client.parse_queue("15|15|N/A|RUNNING|0:10|0:50|1:00|n[1-2]|x|None").id == "15"


def test_fields_of_scontrol():
    line = "JobId=7 JobState=RUNNING Restarts=1 NodeList=n[1-2] Comment=what if JobState=CANCELLED Restarts=9"
    fields = client.parse_fields(line)
    assert (fields["JobState"], fields["Restarts"], fields["NodeList"]) == ("RUNNING", "1", "n[1-2]")


def test_mpi_types_of_old_and_new_slurm():
    new = "MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v4,pmix_v5\n"
    old = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\n"
    assert client.parse_mpi_types(new) == ["none", "pmix", "pmix_v4", "pmix_v5"]
    assert client.parse_mpi_types(old) == ["none", "pmi2", "pmix_v3"]


def test_a_run_file_that_asks_for_another_job_than_the_run_had_is_told(tmp_path, slurm, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("name: r\nlaunch: {command: [sh]}\n")
    for target, told in (("r.yaml", True), ("runs/r", False)):
        Path("runs/r").mkdir(parents=True, exist_ok=True)
        Path("runs/r/run.yaml").write_text("name: r\nlaunch: {command: [sh], nodes: 2, slurm: {time: '2'}}\n")
        said = cli("resume", "--dry-run", target).err
        assert ("launch.nodes is 1 (was 2), launch.slurm.time is" in said and "hpctrain resume" in said) is told
    Path("runs/r/run.yaml").write_text("name: r\nreduce: {key_of_an_older_version: 1}\n")
    cli("resume", "--dry-run", "r.yaml")  # the new run file takes its place


def test_an_array_is_not_resumed_as_a_run(tmp_path, cli):
    for folder in (tmp_path, tmp_path / "0"):
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(f"name: a\nlaunch: {{command: [sh]}}\nrun_dir: {folder}\n")
    assert (
        f"resume one of them: hpctrain resume {tmp_path}/0"
        in cli("resume", "--dry-run", tmp_path, code=ExitCode.USER_ERROR).err
    )
    cli("resume", "--dry-run", tmp_path / "0")


def test_following_goes_on_while_a_run_without_a_job_lives(tmp_path):
    run = RunDir(tmp_path)
    lock = LiveLock(run, myself())
    lock.acquire()
    assert not slurm_commands.is_over(run)
    lock.release()
    assert slurm_commands.is_over(run)


def test_a_controller_that_is_silent_ends_no_waiting(tmp_path, monkeypatch):
    def silent(ids, timeout_s):
        raise RunFailed("squeue refused: Unable to contact slurm controller", "try again")

    run = RunDir(tmp_path)
    jobs.record(run, jobs.Submitted("12", 0.0, "/"))
    monkeypatch.setattr(client, "queue", silent)
    assert schedulers.goes_on(run) and not slurm_commands.is_over(run)
    monkeypatch.setattr(client, "queue", lambda ids, timeout_s=0.0: [])
    assert not schedulers.goes_on(run) and slurm_commands.is_over(run)


def test_how_ranks_share_out_a_model_is_told_in_a_line():
    run = found(attempts=[{"attempt": 1, "started": 1.0, "ranks": 8, "tensor": 2}])
    assert of(run).plain()["progress"]["plan"] == "tensor 2 x data 4"
    assert any(line.startswith("  attempt 1 · tensor 2 x data 4 · ") for line in status.lines([of(run)]))


def test_recoveries_are_told_with_where_the_time_went():
    lost = [event("recovered", 5, time, seconds=2.0, reason=f"rank {time:.0f} was killed") for time in (1, 2, 3, 4)]
    train = event("train", 10, 20.0, steps=10, seconds={"forward": 10.0})
    made = of(found(event("run_started", 0), *lost, train))
    assert [line for line in status.lines([made]) if "ecovered" in line or "goodput" in line] == [
        "  goodput: 50% of 20.0 s; lost: 8.0 s to 4 failures",
        *(f"  recovered after 2.0 s: rank {rank} was killed" for rank in (2, 3, 4)),
    ]


def test_a_daemon_that_takes_no_connection_does_not_answer(slurm):
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        node = f"echo NodeName=n1 NodeAddr=$ADDRESS; echo NodeName=n2 NodeAddr=127.0.0.1 Port={port}"
        answer = f"case $3 in node) {node};; *) echo 'SlurmdPort      = {port}';; esac"
        write_programs(slurm, scontrol=f"[ $1 = show ] || shift\nset -- x $@\n{answer}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ADDRESS", "127.0.0.1")
            assert not client.unreached(["n1", "n2"])
            there.close()
            assert client.unreached(["n1", "n2"]) == {"n1", "n2"}
            patch.setenv("ADDRESS", "no-such-host.invalid")
            assert client.unreached(["n1", "n2"]) == {"n2"}, "it is not known where n1 is"
    write_programs(slurm, scontrol="exit 1")
    assert not client.unreached(["n1"])


FAILED_EARLY = "14|14|N/A|FAILED|0:01|0:59|1:00|n1|2026-11-22T04:02:29|NonZeroExitCode\n"


def test_what_a_job_said_before_the_run_began_is_explained(tmp_path, slurm, cli):
    (slurm / "queue").write_text(FAILED_EARLY)
    run = submitted(tmp_path / "r", "14")
    log = "module: command not found\nhpctrain: line 12 of the job script failed: module load x\n  fix: see above\n"
    (run.logs / "slurm-14.out").write_text(log)
    said = explained(cli, run.path)
    assert "Job 14 is FAILED (NonZeroExitCode), before it wrote anything: module: command not found" in said
    assert "line 12 of the job script failed: module load x fix: see above" in said
    assert f"hpctrain logs {run.path} --rank job" in said


def test_the_comment_of_a_job_whose_log_is_empty_is_explained(tmp_path, slurm, cli):
    client.origin.cache_clear()
    (slurm / "queue").write_text(FAILED_EARLY)
    write_programs(slurm, scontrol="echo '   AdminComment=x'\necho '   Comment=hpctrain: the disk is full'")
    run = submitted(tmp_path / "r", "14")
    assert "before it wrote anything: hpctrain: the disk is full" in explained(cli, run.path)
    client.origin.cache_clear()


@pytest.mark.parametrize(
    ("state", "reason", "title", "advice"),
    [
        ("PENDING", "PartitionDown", "The run has not begun", "take another one that sinfo shows as up"),
        ("PENDING", "JobArrayTaskLimit", "The run has not begun", "when another element of its array ends"),
        ("REQUEUE_HOLD", "job_requeued_in_held_state", "The run has not begun", "scontrol release lets it start"),
        ("SUSPENDED", "None", "The run has not begun", "when slurm or an administrator resumes it"),
        ("CANCELLED", "BeginTime", "The run's job was cancelled", "hpctrain resume submits it again"),
        ("CANCELLED", "DependencyNeverSatisfied", "The run's job was cancelled", "hpctrain resume submits it again"),
    ],
)
def test_advice_on_reasons_to_wait_is_for_jobs_that_wait(tmp_path, slurm, cli, state, reason, title, advice):
    (slurm / "queue").write_text(f"14|14|N/A|{state}|0:01|0:59|1:00|n1|2026-11-22T04:02:29|{reason}\n")
    said = explained(cli, submitted(tmp_path / "r", "14").path)
    assert said.startswith(title) and advice in said.lower()
    assert "launch.slurm.begin" not in said


def test_greetings_of_a_site_are_not_taken_for_jobs(tmp_path, monkeypatch):
    line = "7|7|CANCELLED by 1000|0:15|1-00:00:00|UNLIMITED|n[001-010,12]|Unknown"
    on_path(tmp_path, monkeypatch, sacct=f"echo; echo Welcome to the cluster; echo '{line}'")
    [found] = client.accounted(["7"])
    assert (found.id, found.state, found.elapsed, found.nodes) == ("7", "CANCELLED", "1-00:00:00", "n[001-010,12]")


def test_a_user_without_a_name_may_stop_a_run(tmp_path, monkeypatch):
    """As in a container that is started for any user number."""
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    slurm_commands.request_stop(RunDir(tmp_path))
    assert (tmp_path / "STOP").read_text().startswith(f"{os.geteuid()}@")

"""Status, submissions and logs: what is known, and what is not guessed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli import main
from hpctrain.commands import slurm_end, slurm_status
from hpctrain.errors import ExitCode, RunFailed, UserError
from hpctrain.launch.engines.slurm import client, status, submission
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import decode
from hpctrain.run.folder import RunDir
from hpctrain.run.job import QueueEntry
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.progress import Progress
from hpctrain.run.snapshot import RunSnapshot


def event(name: str, step: int, time: float = 0.0, **fields: Any) -> dict[str, Any]:
    """An event of attempt 1."""
    return {"event": name, "step": step, "time": time, "attempt": 1, **fields}


def found(*events: dict[str, Any], attempts: Sequence[dict[str, Any]] = (), **fields: Any) -> RunSnapshot:
    made = Progress()
    for each in decode("\n".join(map(json.dumps, events)).encode()):
        made.add(each)
    return RunSnapshot(Path("run"), "id", {}, tuple(map(Attempt.from_json, attempts)), made, **fields)


TRAIN = event("train", 30, 100.0, loss=0.5, samples_per_s=640.0, steps=10, seconds={"forward": 1.0, "backward": 4.0})
STARTED = event("run_started", 0, 0.0, total_steps=100)


def test_progress_from_events() -> None:
    made = status.progress(found(STARTED, TRAIN, attempts=[{"attempt": 1}], checkpoint_step=24), 107.0)
    assert (made.attempt, made.step, made.steps, made.checkpoint, made.silent_s) == (1, 30, 100, 24, 7.0)
    assert made.left_s == pytest.approx(35.0), "70 steps at 2 steps a second"
    assert made.ended is None


def test_an_empty_folder_is_no_error() -> None:
    made = status.progress(found(), 0.0)
    assert (made.attempt, made.step, made.left_s) == (None, None, None)
    assert status.lines([status.RunStatus("r", None, "not submitted", "", "", "", "", made)])[1] == "  not submitted"


def test_the_end_is_in_the_verdicts_words() -> None:
    verdict = {"action": "requeue", "exit_code": 70, "reason": "rank 3 on n2 was killed"}
    made = status.progress(found(TRAIN, attempts=[{"attempt": 2, "ended": 5.0, "verdict": verdict}]), 0.0)
    assert made.ended == "rank 3 on n2 was killed"
    text = "\n".join(status.lines([status.RunStatus("r", "7", "FAILED", "", "n1", "", "", made)]))
    assert "last attempt: rank 3 on n2 was killed" in text and "to go" not in text


def test_a_forgotten_job_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    submission.record(run, submission.Submitted("12", 0.0, "/"))
    monkeypatch.setattr(client, "queue", lambda ids: [])
    monkeypatch.setattr(client, "accounted", lambda ids: [])
    [made] = status.of_runs([run])
    assert (made.state, made.job) == ("UNKNOWN", "12")


def test_without_slurm_the_folder_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    Attempts(run).begin()
    submission.record(run, submission.Submitted("12", 0.0, "/"))
    monkeypatch.setenv("PATH", "")
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "job 12 UNKNOWN" in said and "squeue is not on PATH" in said and "attempt 1" in said


def test_a_folder_of_somebody_else_is_not_asked_to_stop(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="STOP cannot be made"):
        slurm_end.request_stop(RunDir(tmp_path / "missing"))


def test_slurm_is_asked_once_for_all_elements_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(ids: list[str]) -> list[QueueEntry]:
        asked.append(list(ids))
        return [QueueEntry(job, "RUNNING", "", "", "", "", "", "") for job in ids if job != "5_2"]

    monkeypatch.setattr(client, "queue", answer)
    monkeypatch.setattr(client, "accounted", lambda ids: asked.append(list(ids)) or [])
    for index in range(3):
        (tmp_path / str(index)).mkdir()
        submission.record(RunDir(tmp_path / str(index)), submission.Submitted(f"5_{index}", 0.0, "/"))
    found = status.of_runs([RunDir(tmp_path / str(index)) for index in range(3)])
    assert [each.state for each in found] == ["RUNNING", "RUNNING", "UNKNOWN"]
    assert asked == [["5_0", "5_1", "5_2"], ["5_2"]]


def test_the_living_job_is_shown_before_the_newest() -> None:
    entries = [
        client.parse_queue(f"{job}|{job}|N/A|{state}|1|2|3|n1|now|None")
        for job, state in (("1", "RUNNING"), ("2", "CANCELLED"))
    ]
    found = status.newest(["1", "2"], {entry.id: entry for entry in entries})
    assert found is not None and found.id == "1"


def test_lines_of_squeue() -> None:
    entry = client.parse_queue("15|12|3|PENDING|0:00|1:00|1:00||N/A|Resources|or not\n")
    assert (entry.id, entry.state, entry.reason) == ("12_3", "PENDING", "Resources|or not")
    assert client.parse_queue("15|15|N/A|RUNNING|0:10|0:50|1:00|n[1-2]|x|None").id == "15"


def test_fields_of_scontrol() -> None:
    line = "JobId=7 JobState=RUNNING Restarts=1 NodeList=n[1-2] Comment=what if JobState=CANCELLED Restarts=9"
    fields = client.parse_fields(line)
    assert (fields["JobState"], fields["Restarts"], fields["NodeList"]) == ("RUNNING", "1", "n[1-2]")


def test_mpi_types_of_old_and_new_slurm() -> None:
    new = "MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v4,pmix_v5\n"
    old = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\n"
    assert client.parse_mpi_types(new) == ["none", "pmix", "pmix_v4", "pmix_v5"]
    assert client.parse_mpi_types(old) == ["none", "pmi2", "pmix_v3"]


def test_sweeps(tmp_path: Path) -> None:
    assert submission.sweep(["seed=0,1", "lr=a,b"]) == [
        ["--seed=0", "--lr=a"], ["--seed=0", "--lr=b"], ["--seed=1", "--lr=a"], ["--seed=1", "--lr=b"],
    ]  # fmt: skip
    (tmp_path / "sweep").write_text("# two\n--seed 1 --name 'a b'\n\n--seed 2  # the second\n")
    assert submission.sweep([str(tmp_path / "sweep")]) == [["--seed", "1", "--name", "a b"], ["--seed", "2"]]
    with pytest.raises(UserError, match="No such file"):
        submission.sweep(["nothing"])
    (tmp_path / "torn").write_text("--name 'a\n")
    with pytest.raises(UserError, match="No closing quotation"):
        submission.sweep([str(tmp_path / "torn")])
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(UserError, match="no elements"):
        submission.sweep([str(tmp_path / "empty")])


def test_an_array_is_not_resumed_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "0"):
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(f"name: a\nlaunch: {{command: [sh]}}\nrun_dir: {folder}\n")
    assert main(["resume", "--dry-run", str(tmp_path)]) == ExitCode.USER_ERROR
    assert f"resume one of them: hpctrain resume {tmp_path}/0" in capsys.readouterr().err
    assert main(["resume", "--dry-run", str(tmp_path / "0")]) == 0


def test_following_goes_on_while_a_run_without_a_job_lives(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lock = LiveLock(run, myself())
    lock.acquire()
    assert not slurm_status.is_over(run)
    lock.release()
    assert slurm_status.is_over(run)


def test_a_controller_that_is_silent_ends_no_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(ids: list[str]) -> list[QueueEntry]:
        raise RunFailed("squeue refused: Unable to contact slurm controller", "try again")

    run = RunDir(tmp_path)
    submission.record(run, submission.Submitted("12", 0.0, "/"))
    monkeypatch.setattr(client, "queue", silent)
    assert submission.goes_on(run) and not slurm_status.is_over(run)
    monkeypatch.setattr(client, "queue", lambda ids: [])
    assert not submission.goes_on(run) and slurm_status.is_over(run)

"""The live view: what it says of runs in any condition, that it fits the screen, and that it only reads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import Code
from hpctrain.run import live_lock, run_status
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.progress import Progress
from hpctrain.run.run_status import Life, LiveWindow, QueueEntry, RunSnapshot, Word
from hpctrain.run.run_view import RunView
from hpctrain.run.verdict import failed_with
from hpctrain.system.json_shape import maker
from hpctrain.watch.screen import clean, draw, sparkline
from hpctrain.watch.terminal import WatchedRun
from hpctrain.watch.view import View, make
from tests.unit.run.test_progress import add, event, progress, trained
from tests.unit.run.test_tail import bytes_read_by_this_process

NOW = 1000.0
HERE = Life(lives=True, sure=True, name="process 7 on n1")
DONE = {"action": "done", "exit_code": 0, "reason": "done after step 100"}
KILLED = {"action": "requeue", "exit_code": 70, "reason": "rank 1 on n2 was killed", "fix": "see the rank's log"}


def attempt(number: int = 1, ended: float | None = None, verdict: dict[str, Any] | None = None, **more: Any) -> Any:
    entry = {"attempt": number, "started": 0.0, "ranks": 2, **more}
    return entry if ended is None else {**entry, "ended": ended, "verdict": verdict}


def job(word: str, left: str = "1:00") -> QueueEntry:
    return QueueEntry("12", word, "Priority" if word == "PENDING" else "", "0:10", left, "2:00", "n1", "")


def running() -> Progress:
    return progress(
        event("run_started", 0, at=NOW - 101, ranks=2, hosts=["n1", "n2"], framework="torch", reducer="mpi",
              total_steps=100),
        *({**trained(step, at=NOW - 101 + step, loss=10 / step), "samples_per_s": 64.0, "epoch": step // 25}
          for step in range(10, 60, 10)),
        event("eval", 50, at=NOW - 50, metrics={"accuracy": 0.75}),
        event("checkpoint_saved", 40, at=NOW - 60, bytes=5 << 20, stall_s=0.002, write_s=1.5),
    )  # fmt: skip


def live(ranks: int, most: int = 64) -> dict[str, Any]:
    """What the monitor's first agent writes."""
    shown = [
        {"rank": rank, "host": f"node{rank // 8:03}", "busy_s": 0.01 + 1e-5 * rank, "wait_s": 0.02 - 1e-5 * rank,
         "excess": 1e-3 * rank, "cost": 0.0}
        for rank in range(ranks)[-most:]
    ]  # fmt: skip
    return {"time": NOW, "attempt": 1, "step": 50, "num_ranks": ranks, "ranks": shown, "verdicts": [],
            "dropped_windows": 0}  # fmt: skip


def view(**changes: Any) -> View:
    config = {"name": "wave", "train": {"epochs": 4}}
    window = maker(LiveWindow)(live(2))
    found = RunSnapshot(Path("/runs/wave"), "id", config, typed(attempt()), running(), HERE, window)
    job, age = changes.pop("job", None), changes.pop("job_age_s", 0.0)
    return make(replace(found, **changes), NOW, job, age)


def typed(*entries: dict[str, Any]) -> tuple[Attempt, ...]:
    return tuple(map(Attempt.from_json, entries))


def text(shown: View, width: int = 100, height: int = 40) -> str:
    return "\n".join(line.plain for line in draw(shown, width, height))


@pytest.mark.parametrize(
    ("attempts", "events", "life", "entry", "word", "is_over"),
    [
        ([], progress(), None, None, Word.NOT_STARTED, False),
        ([], progress(), None, job("PENDING"), Word.PENDING, False),
        ([], progress(), None, job("RUNNING"), Word.RUNNING, False),
        ([], progress(), None, job("FAILED"), Word.FAILED, True),
        ([], progress(), None, job("CANCELLED"), Word.CANCELLED, True),
        ([], progress(), None, replace(job("UNKNOWN"), reason="Slurm has forgotten it"), Word.UNKNOWN, False),
        ([], progress(), None, replace(job("REFUSED"), reason="sbatch refused"), Word.NOT_STARTED, True),
        ([attempt()], running(), None, job("CANCELLED"), Word.UNKNOWN, True),
        ([attempt(job_id="12")], running(), None, job("CANCELLED"), Word.CANCELLED, True),
        ([attempt(1, 5.0, DONE, job_id="12")], running(), None, job("TIMEOUT"), Word.FINISHED, True),
        ([attempt()], progress(), HERE, None, Word.RUNNING, False),
        ([attempt()], running(), None, job("RUNNING"), Word.RUNNING, False),
        ([attempt()], running(), replace(HERE, lives=False), None, Word.UNKNOWN, True),
        ([attempt()], running(), Life(False, False, "process 7 on n1"), None, Word.UNKNOWN, False),
        ([attempt()], running(), Life(False, False, "process 7 on n1"), job("RUNNING"), Word.UNKNOWN, False),
        ([attempt()], running(), Life(False, False, "process 7 on n1"), job("SUSPENDED"), Word.PENDING, False),
        ([attempt()], running(), None, None, Word.UNKNOWN, True),
        ([attempt(job_id="12")], running(), None, job("TIMEOUT"), Word.FAILED, True),
        ([attempt(job_id="12")], running(), None, job("COMPLETED"), Word.UNKNOWN, True),
        ([attempt(job_id="12")], running(), None, job("PENDING"), Word.PENDING, False),
        ([attempt(1, 5.0, DONE)], running(), None, None, Word.FINISHED, True),
        ([attempt(1, 5.0, DONE)], running(), HERE, job("RUNNING"), Word.FINISHED, True),
        ([attempt(1, 5.0, KILLED)], running(), None, None, Word.FAILED, True),
        ([attempt(1, 5.0, KILLED, job_id="12")], running(), None, job("RUNNING"), Word.PENDING, False),
        ([attempt(1, 5.0, KILLED, job_id="12")], running(), None, job("PENDING"), Word.PENDING, False),
        ([attempt(1, 5.0, KILLED, job_id="12")], running(), None, job("FAILED"), Word.FAILED, True),
        ([attempt(1, 5.0, KILLED, job_id="12")], running(), None, None, Word.UNKNOWN, False),
        (
            [attempt(1, 5.0, {"action": "stop", "exit_code": 75, "reason": ""})],
            running(),
            None,
            None,
            Word.STOPPED,
            True,
        ),
        ([attempt(1, 5.0, None)], running(), None, None, Word.UNKNOWN, True),
        ([], progress(trained(9), event("run_finished", 9, reason="completed")), None, None, Word.FINISHED, True),
        ([attempt()], progress(event("run_finished", 9, reason="completed")), HERE, None, Word.RUNNING, False),
        ([attempt()], progress(event("run_finished", 9, reason="completed")), None, None, Word.FINISHED, True),
        ([], running(), None, None, Word.RUNNING, False),
        ([], progress(trained(9)), None, None, Word.UNKNOWN, True),
    ],
)
def test_how_a_run_stands(attempts, events, life, entry, word, is_over):
    found = run_status.of_run(typed(*attempts), events, life, entry, NOW)
    assert (found.word, found.is_over) == (word, is_over)
    assert found.why or found.word in (Word.NOT_STARTED, Word.RUNNING, Word.STOPPED)


def test_the_learning_rate_itself_and_training_metrics_are_lines_of_their_own():
    made = running()
    add(made, {**trained(60, at=NOW), "lr": 0.5, "learning_rate": 1.5e-4, "accuracy": 0.25})
    shown = text(view(progress=made))
    assert "learning rate          0.00015" in shown and "training accuracy         0.25" in shown, shown


def test_the_view_of_a_running_run():
    made = view(job=job("RUNNING", left="0:30"), job_age_s=10.0)
    assert (made.step, made.total_steps, made.steps_per_s) == (50, 100, pytest.approx(1.0))
    assert made.end_in_s == pytest.approx(50 - 51, abs=1) and made.limit_in_s == pytest.approx(20.0)
    assert made.checkpoint is not None and made.checkpoint.age_s == pytest.approx(60.0)
    shown = text(made)
    for part in (
        "wave  running  attempt 1  2 ranks on 2 hosts  torch  reducer mpi  job 12",
        "step 50/100", "50%", "epoch 2/4", "1 steps/s  64 samples/s", "time limit in 20.0 s",
        "validation accuracy", "0.75", "learning rate",
        "step 40, 1 min 00 s ago, 5.0 MiB, written in 1.5 s, stall 2 ms",
        "500 ms: forward 100%", "nothing stands out",
    ):  # fmt: skip
        assert part in shown, f"{part}\n{shown}"
    assert [line.split()[:2] for line in shown.splitlines() if "█" in line and "░" in line] == [
        ["0", "node000"],
        ["1", "node000"],
    ]


def test_on_a_narrow_screen_the_time_limit_is_on_the_next_line():
    """It was cut off behind rates."""
    shown = text(view(job=job("RUNNING", left="0:30"), job_age_s=10.0), width=40).splitlines()
    assert "  time limit in 20.0 s" in shown and all(len(line) <= 40 for line in shown)


def test_a_suspended_job_is_shown_as_status_shows_it_and_counts_nothing_down():
    made = view(job=job("SUSPENDED", left="0:30"))
    assert made.state == run_status.of_run(typed(attempt()), running(), HERE, job("SUSPENDED"), NOW)
    shown = text(made)
    assert "pending" in shown and "job 12 waits (SUSPENDED)" in shown
    assert "ends in" not in shown and "time limit" not in shown


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 12)])
def test_a_thousand_ranks_fit_the_screen_the_slowest_first(width, height):
    made = view(live=maker(LiveWindow)(live(1024)), attempts=typed({**attempt(), "ranks": 1024}))
    lines = draw(made, width, height)
    assert len(lines) <= height and max(line.cell_len for line in lines) <= width
    bars = [int(line.plain.split()[0]) for line in lines if "node" in line.plain and "█" in line.plain]
    assert len(bars) >= 3 or height < 20
    assert bars == sorted(bars, reverse=True) and bars[:1] in ([1023], [])
    assert height < 20 or f"the {len(bars)} slowest of 1024" in "\n".join(line.plain for line in lines)


def test_verdicts_stay_on_the_lowest_of_screens():
    made = view(live=maker(LiveWindow)(live(1024)), attempts=typed({**attempt(), "ranks": 1024}))
    foot = [line.plain for line in draw(made, 80, 60)][-1]
    assert [line.plain for line in draw(made, 80, 8)][-1] == foot


def test_a_plain_command_runs_without_events():
    made = view(progress=Progress(), config={"launch": {"command": ["true"]}})
    assert made.state == run_status.RunState(Word.RUNNING)


def test_verdicts_and_failures_are_sentences():
    slow = "rank 1 on n2 is 24% slower than its peers: reading data, which costs 19% of the time"
    shown = text(view(live=maker(LiveWindow)({**live(2), "verdicts": [slow]})), width=60)
    assert slow.split(":")[0] in shown and "nothing stands out" not in shown
    made = view(attempts=typed(attempt(1, 5.0, KILLED), attempt(2, restarts=1)))
    shown = text(made)
    assert "attempt 2  1 requeue" in shown and "rank 1 on n2 was killed (see the rank's log)" in shown
    assert "█" not in shown.split("time of a step")[1], "the last window is that of another attempt"


def test_what_the_monitor_confirmed_stays_when_the_run_has_ended():
    events = running()
    add(events, event("straggler", 40, kind="rank", ranks=[1], state="confirmed", sentence="rank 1 is slow"))
    made = view(progress=events, attempts=typed(attempt(1, 5.0, DONE)), life=None)
    assert made.verdicts == ("rank 1 is slow",)


def test_without_anything_the_view_says_so():
    made = make(RunSnapshot(Path("/runs/wave"), None, {}, (), Progress()), NOW)
    assert text(made) == "wave  not started"
    json.dumps(made.plain())


def test_checkpoints_are_known_from_the_attempts_where_events_are_lost():
    made = make(RunSnapshot(Path("x"), None, {}, typed(attempt(1, 5.0, KILLED, to_step=40)), Progress()), NOW)
    assert made.checkpoint is not None and made.checkpoint.step == 40
    assert "checkpoint          step 40" in text(made)


def test_text_of_files_cannot_command_the_terminal():
    assert clean("a\x1b[2J\x07\nb") == "a b"
    assert "\x1b" not in text(view(config={"name": "evil\x1b[2J"}))


def test_how_ranks_share_out_a_model_stands_at_the_top():
    entry = {**attempt(), "ranks": 8, "tensor": 2, "shard": "optimizer"}
    shown = view(attempts=typed(entry))
    assert shown.plan == shown.plain()["plan"] == "tensor 2 x data 4, shard optimizer"
    assert "8 ranks on 2 hosts  tensor 2 x data 4, shard optimizer" in text(shown)
    assert view().plan == ""


def test_curves():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(range(1000), 30)) == 30
    assert sparkline([2.0, 2.0], 8) == "▄▄"
    assert sparkline([], 8) == ""


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    """A run of this very process."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.run_yaml.write_text("name: wave\n")
    Attempts(run).begin(Attempt(ranks=2))
    live_lock.LiveLock(run, live_lock.myself()).acquire()
    lines = [{"hosts": ["a"], "total_steps": 10**6, **event("run_started", 0)}, *(trained(n) for n in range(1, 5000))]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.monitor / "live.json").write_text(json.dumps(live(2)))
    return run


def everything(folder: Path) -> dict[str, tuple[int, ...]]:
    """Times, sizes and modes of a folder and all that is in it."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_size) for path in paths}


def test_looking_reads_what_is_new_and_writes_nothing(folder):
    for path in (folder.path, *folder.path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before, source = everything(folder.path), WatchedRun(RunView(folder.path))
    began = bytes_read_by_this_process()
    first = source.look(whole=True)
    assert first.state.word is Word.RUNNING and first.step == 4999
    size = folder.events.stat().st_size
    first_bytes = bytes_read_by_this_process() - began
    assert first_bytes < size + 20_000
    began = bytes_read_by_this_process()
    for _ in range(20):
        source.look()
    assert bytes_read_by_this_process() - began < 20 * 1500, "/proc alone, to see that the process lives"
    assert everything(folder.path) == before
    folder.path.chmod(0o755)


def test_a_run_that_is_being_torn_down_while_it_is_watched(folder):
    source = WatchedRun(RunView(folder.path))
    source.look()
    folder.run_json.write_text('{"attempts": [')
    with open(folder.events, "a") as file:
        file.write('{"time": 17, "eve')
    (folder.monitor / "live.json").write_text("")
    assert source.look().step == 4999
    for path in (folder.events, folder.run_json, folder.lock_file, folder.monitor / "live.json"):
        path.unlink()
    made = source.look()
    assert (made.step, made.state.word, made.run) == (4999, Word.UNKNOWN, "wave")
    assert asdict(made)["ranks"]


def test_a_run_that_begins_and_ends_while_it_is_watched(tmp_path):
    run = RunDir(tmp_path / "run")
    source = WatchedRun(RunView(run.path))
    assert source.look().state.word is Word.NOT_STARTED
    run.create()
    lock = live_lock.LiveLock(run, live_lock.myself())
    lock.acquire()
    number = Attempts(run).begin(Attempt(ranks=1))
    assert (source.look().state.word, source.look().state.why) == (Word.RUNNING, "starting")
    run.events.write_text(json.dumps({"total_steps": 10, "hosts": ["a"], **event("run_started", 0)}) + "\n")
    assert source.look().state.why == ""
    Attempts(run).end(number, failed_with(Code.KILLED, KILLED["reason"], KILLED["fix"]), [])
    lock.release()
    made = source.look()
    assert made.state == run_status.RunState(Word.FAILED, "rank 1 on n2 was killed", is_over=True)


def test_a_holder_on_another_machine_is_believed_while_it_gives_signs_of_life(folder):
    holder = json.loads(folder.lock_file.read_text())
    folder.lock_file.write_text(json.dumps({**holder, "machine": "another"}))
    source = WatchedRun(RunView(folder.path))
    assert source.look().state.word is Word.RUNNING
    os.utime(folder.lock_file, (1.0, 1.0))
    late = WatchedRun(RunView(folder.path)).look().state
    assert (late.word, late.is_over) == (Word.UNKNOWN, False) and "no sign of life" in late.why


def test_recoveries_are_shown_with_where_the_time_went():
    lost = event("recovered", 5, at=NOW - 90, seconds=2.0, reason="rank 1 on n1 was killed")
    made = progress(event("run_started", 0, at=NOW - 100), lost, trained(10, at=NOW - 50))
    shown = make(RunSnapshot(Path("/runs/wave"), "id", {}, (), made), NOW)
    lines = [line.plain for line in draw(shown, 100, 30)]
    assert "goodput             10% of 50.0 s; lost: 2.0 s to 1 failure" in lines
    assert any("recovered after 2.0 s: rank 1 on n1 was killed" in line for line in lines)
    [told] = shown.plain()["recoveries"]
    assert (told["seconds"], shown.plain()["account"]["goodput"]) == (2.0, 0.1)


def test_a_stop_that_was_asked_for_is_not_red():
    asked = event("stop_requested", 5, at=NOW - 80, by="ada", code="time_limit")
    failed = event("checkpoint_failed", 6, at=NOW - 70, error="disk full")
    made = progress(event("run_started", 0, at=NOW - 100), asked, failed)
    lines = draw(make(RunSnapshot(Path("/runs/wave"), "id", {}, (), made), NOW), 100, 30)
    styles = {line.plain.partition(": ")[2]: str(line.style) for line in lines if "attempt 1, step" in line.plain}
    assert styles == {
        "asked to stop before the time limit": "",
        "the checkpoint could not be written: disk full": "red",
    }


def test_ranks_are_shown_with_their_gpus():
    device = {"rank": 1, "peak_bytes": 2.0**36, "busy": 0.98, "watts": 640.4, "mhz": 1980.0, "slowed": ["heat"]}
    lines = text(view(live=maker(LiveWindow)(live(2) | {"devices": [device]}))).splitlines()
    top = next(index for index, line in enumerate(lines) if "busy ms" in line)
    assert lines[top].split()[6:11] == ["excess", "GiB", "GPU", "W", "MHz"]
    assert lines[top + 1].split()[5:9] == ["–", "–%", "–", "–"]
    assert lines[top + 2].split()[5:9] == ["64.0", "98%", "640", "1980"]
    assert "GiB" not in text(view())

"""Reports: what is read of a run folder, what is drawn, and what is said about it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import Code, ExitCode, UserError
from hpctrain.report import drawing, page
from hpctrain.report.compare import compare, differences, tables
from hpctrain.report.explain import explain
from hpctrain.report.plots import shrink, thin, time_unit
from hpctrain.report.summary import make_spans, rank_hours, summarize
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.events import Event, Hang, Straggler
from hpctrain.run.folder import RunDir
from hpctrain.run.history import KEPT_EVENTS, RunHistory
from hpctrain.run.last_words import AttemptWords, Ending, ErrorWord, LastWord
from hpctrain.run.progress import Progress
from hpctrain.run.run_status import RunSnapshot
from hpctrain.run.run_view import RunView, run_config
from hpctrain.run.verdict import Action, RunVerdict
from hpctrain.system.json_shape import flat

BEGIN = 1_700_000_000.0


def event(name: str, step: int, attempt: int = 1, at: float | None = None, **fields: Any) -> dict[str, Any]:
    return {"time": BEGIN + (step if at is None else at), "event": name, "step": step, "attempt": attempt, **fields}


def trained(step: int, attempt: int = 1, at: float | None = None, loss: float = 1.0) -> dict[str, Any]:
    seconds = {"forward": 0.4, "backward": 0.4, "data": 0.1, "checkpoint": 0.1}
    return event("train", step, attempt, at, loss=loss, lr=0.1, samples_per_s=100.0, seconds=seconds, epoch=0)


def folder(tmp_path: Path, *events: dict[str, Any], info: dict[str, Any] | None = None, tail: str = "") -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.events.write_text("".join(json.dumps(each) + "\n" for each in events) + tail)
    if info is not None:
        run_dir.run_json.write_text(json.dumps(info))
    return run_dir


def attempt(number: int, begin: float, end: float | None, **verdict: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"attempt": number, "started": BEGIN + begin, "from_step": None, "to_step": None}
    return entry if end is None else {**entry, "ended": BEGIN + end, "verdict": verdict}


def test_the_step_of_a_run_is_that_of_its_newest_attempt(tmp_path):
    """After ``--fresh`` the page still named the last step of the run that was put aside."""
    old = trained(8000), event("checkpoint_saved", 8000, bytes=1)
    again = event("run_started", 0, 2, 9000, ranks=1), trained(80, 2, 9001)
    assert summarize(RunView(folder(tmp_path, *old, *again).path).history())["steps"] == 80
    assert summarize(RunView(folder(tmp_path / "one", *old).path).history())["steps"] == 8000


def read(run: RunDir) -> RunHistory:
    return RunView(run.path).history()


DONE = {"action": "done", "exit_code": 0, "reason": "done after step 4"}


def test_steps_that_were_computed_again_count_once(tmp_path):
    run_dir = folder(
        tmp_path,
        event("run_started", 0, ranks=2, hosts=["a"]),
        trained(1, loss=4.0),
        trained(2, loss=3.0),
        trained(3, loss=99.0),
        event("resumed", 2, attempt=2, at=10, path="x"),
        trained(3, attempt=2, at=11, loss=2.0),
        tail='{"time": 1, "event": "tra',
    )
    data = read(run_dir)
    assert data.train["loss"].step.tolist() == [1, 2, 3]
    assert data.train["loss"].value.tolist() == [4.0, 3.0, 2.0]
    assert data.counts["train"] == 4


def test_an_empty_folder_is_a_report_that_knows_nothing(tmp_path):
    data = read(RunDir(tmp_path))
    assert explain(data).cause == "unknown"
    assert summarize(data)["state"] == "unknown"
    assert "unknown" in page.render(data, explain(data), page.make_sections(data))


def test_memory_is_bounded_for_rare_events_too(tmp_path):
    run_dir = folder(tmp_path, *(event("straggler", step, state="suspect") for step in range(KEPT_EVENTS + 50)))
    data = read(run_dir)
    kept = [each.step for each in data.all(Straggler)]
    assert len(kept) == KEPT_EVENTS
    half = KEPT_EVENTS // 2
    assert kept == [*range(half), *range(half + 50, KEPT_EVENTS + 50)]
    assert data.counts["straggler"] == KEPT_EVENTS + 50


def test_goodput_is_time_in_new_steps_over_wall_time(tmp_path):
    info = {"attempts": [attempt(1, 0, 6, **DONE), attempt(2, 8, 12, **DONE)]}
    data = read(folder(tmp_path, *(trained(step) for step in range(1, 6)), info=info))
    summary = summarize(data)
    assert summary["goodput"] == pytest.approx(5 * 0.9 / 12)
    assert (summary["account"]["waiting_s"], summary["account"]["failures_s"]) == (2, 0)


def test_an_attempt_that_was_killed_with_its_supervisor_ends_with_its_last_event(tmp_path):
    info = {"attempts": [attempt(1, 0, None), {**attempt(2, 100, 110, **DONE), "from_step": 3}]}
    events = [*(trained(step) for step in (1, 2, 3, 4, 5)), trained(4, 2, at=105)]
    first, second = make_spans(read(folder(tmp_path, *events, info=info)))
    assert (first.end - BEGIN, first.to_step, first.ending, first.orderly) == (5, 3, "unknown", False)
    assert (second.end - BEGIN, second.ending) == (110, "done after step 4")


@given(st.lists(st.floats(allow_nan=True, width=32), max_size=300), st.integers(4, 60))
def test_thinning_keeps_ends_peaks_and_order(values, points):
    y = np.array(values)
    chosen = thin(y, points)
    finite = np.flatnonzero(np.isfinite(y))
    assert len(chosen) <= max(points, min(len(finite), points))
    assert (np.diff(chosen) > 0).all()
    if len(finite):
        assert chosen[0] == finite[0] and chosen[-1] == finite[-1]
        assert y[chosen].max() == y[finite].max()
        assert y[chosen].min() == y[finite].min()


def test_time_units():
    assert [time_unit(seconds)[1] for seconds in (30, 300, 30_000, 3e6)] == ["seconds", "minutes", "hours", "days"]


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path):
    info = {"attempts": [attempt(1, 0, 6, **DONE)]}
    events = [
        event("run_started", 0, ranks=2, hosts=["<b>"], versions={"x": "1"}),
        *(trained(step) for step in range(1, 6)),
    ]
    data = read(folder(tmp_path, *events, event("eval", 4, metrics={"accuracy": 0.5}), info=info))
    text = page.render(data, explain(data), page.make_sections(data, excess=np.ones((2, 3))))
    assert not re.search(r"(src|href)=\"(?!data:|#)|https?://|url\((?!#)|@import", text)
    assert "<b>" not in text.replace("<b>The", "").replace("<b>4", "").split("Versions and hosts")[1]
    assert "&lt;b&gt;" in text
    for title in (
        "Loss",
        "Validation metrics",
        "Learning rate, as a factor",
        "Samples per second",
        "Where the time goes",
        "Attempts",
    ):
        assert title in text
    assert "<td>0.5</td>" in text


def failed(reason: str, code: Code, action: Action = Action.REQUEUE) -> RunHistory:
    verdict = RunVerdict(action, ExitCode.FAILURE, reason, "do this", 1, "n2", code)
    return with_attempts([Attempt(1, BEGIN, BEGIN + 5, verdict=verdict).to_json()])


def with_attempts(
    entries: list[dict[str, Any]], words: Mapping[int, AttemptWords] | None = None, rare: Sequence[Event] = ()
) -> RunHistory:
    attempts = tuple(map(Attempt.from_json, entries))
    run = RunSnapshot(Path("run"), None, {}, attempts, Progress(), words=words or {})
    return RunHistory(run, {}, {}, {}, tuple(rare), {"train": 1})


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (failed("the loss is not finite at step 3 (rank 1, samples 7)", Code.NAN), "nan"),
        (failed("the launcher started 4 ranks but MPI sees 1", Code.SINGLETONS), "singletons"),
        (failed("cannot write run/events.jsonl: No space left on device", Code.DISK_FULL), "disk_full"),
        (failed("Horovod is not installed", Code.HOROVOD, Action.FAIL), "horovod"),
        (failed("run.yaml:3: unknown key 'x'", Code.USER_ERROR, Action.FAIL), "user_error"),
        (failed("ZeroDivisionError: division by zero (task.py:12)", Code.EXCEPTION), "exception"),
        (failed("rank 1 on n2 was killed by SIGKILL", Code.KILLED), "killed"),
        (failed("rank 1 on n2 was ended by the kernel", Code.OUT_OF_MEMORY), "out_of_memory"),
        (failed("node n2 failed", Code.NODE), "node"),
        (failed("no step for 60 s", Code.HANG), "hang"),
        (failed("3 attempts in a row failed", Code.NO_PROGRESS, Action.DO_NOT_REQUEUE), "no_progress"),
        (failed("runs/a is in use by another live run", Code.IN_USE, Action.FAIL), "in_use"),
        (failed("runs/a is in use by another live run", Code.KILLED), "killed"),
    ],
)
def test_explanations_name_cause_rank_and_cure(data, cause):
    answer = explain(data)
    assert answer.cause == cause
    assert "Do this." in answer.text
    assert "rank 1" in answer.text.lower()


@pytest.mark.parametrize("code", Code)
def test_the_cause_of_a_failure_is_its_code_whatever_its_sentence_says(code):
    answer = explain(failed("something of rank 1", code))
    assert answer.cause is code and answer.title and "something of rank 1" in answer.text.lower()


def test_a_failure_without_a_code_is_shown_and_not_read():
    old = {
        "action": "requeue",
        "exit_code": 70,
        "reason": "No space left on device",
        "fix": "do this",
    }
    answer = explain(with_attempts([attempt(1, 0, 5, **old)]))
    assert (answer.cause, answer.title) == (Code.UNKNOWN, "The run failed")
    assert answer.text == "No space left on device. Do this."


def words_of(rank: int, **fields: Any) -> LastWord:
    return dataclasses.replace(LastWord(rank, f"n{rank}", 1, 1.0, BEGIN, Ending.FAILED, BEGIN + 5 - rank, 64), **fields)


def test_where_no_supervisor_lived_the_first_rank_that_failed_tells():
    errors = [ErrorWord(f"error {rank}", "do this", "UserError", "", Code.USER_ERROR) for rank in range(3)]
    ranks = (words_of(0, ending=Ending.RUNNING), *(words_of(rank, error=errors[rank]) for rank in (1, 2)))
    answer = explain(with_attempts([attempt(1, 0, None)], words={1: AttemptWords(ranks)}))
    assert (answer.cause, answer.evidence) == (Code.USER_ERROR, ("rank 2 on n2: error 2",))


@pytest.mark.parametrize(("of", "cause"), [(1, Code.EXCEPTION), (2, Code.HANG)])
@pytest.mark.parametrize("ended", [True, False])
def test_a_hang_of_an_older_attempt_is_not_told_of_the_newest_one(of, cause, ended):
    verdict = RunVerdict(Action.REQUEUE, ExitCode.FAILURE, "ValueError: x", "do this", 1, "n2", Code.EXCEPTION)
    newest = attempt(2, 10, 20, **verdict.to_json()) if ended else attempt(2, 10, None)
    hangs = [Hang(step=3, attempt=of, time=BEGIN + 30, sentence="rank 3 does not move")]  # told late
    answer = explain(with_attempts([attempt(1, 0, 9, action="requeue", exit_code=70), newest], rare=hangs))
    assert answer.cause is (cause if ended or of == 2 else Code.UNKNOWN)
    assert ("rank 3 does not move" in answer.text.lower()) is (of == 2)


def test_the_hang_of_an_older_attempt_is_no_evidence_for_a_death_in_the_newest_one():
    hangs = [Hang(step=3, attempt=each, sentence=f"hang of {each}") for each in (2, 2, 1)]
    hangs[0] = dataclasses.replace(hangs[0], sentence="an earlier hang")
    killed = RunVerdict(Action.REQUEUE, ExitCode.FAILURE, "rank 1 was killed", code=Code.KILLED).to_json()
    entries = [attempt(1, 0, 9, action="requeue", exit_code=70), attempt(2, 10, 20, **killed)]
    answer = explain(with_attempts(entries, rare=hangs))
    assert answer.evidence == ("rank 1 was killed", "hang of 2")


def test_a_run_that_stopped_for_its_time_limit(tmp_path):
    info = {
        "attempts": [attempt(1, 0, 6, action="requeue", exit_code=75, reason="stopped at step 4", code="time_limit")]
    }
    events = [
        trained(4),
        event("stop_requested", 4, by="signal SIGUSR1"),
        event("checkpoint_saved", 4, path="x", bytes=1),
    ]
    finished = event("run_finished", 4, reason="stop_requested", steps=4, seconds=6.0)
    answer = explain(read(folder(tmp_path, *events, finished, info=info)))
    assert answer.cause == "time_limit"
    assert "step 4" in answer.text and "resumes" in answer.text


def test_what_slows_a_running_run(tmp_path):
    slow = event(
        "straggler",
        3,
        rank=3,
        host="n2",
        state="confirmed",
        cost=0.19,
        kind="rank",
        cause="data",
        sentence="rank 3 on n2 is slow",
    )
    info = {"attempts": [attempt(1, 0, None)]}
    answer = explain(read(folder(tmp_path, trained(2), slow, info=info)))
    assert (answer.cause, answer.title) == ("straggler", "The run is under way; rank 3 on n2 is slow")


def test_a_run_that_cannot_save_is_told_what_that_means(tmp_path):
    events = [event("checkpoint_failed", step, path="x", error="disk full", failures=step - 1) for step in (2, 3, 4)]
    info = {"attempts": [attempt(1, 0, None)]}
    answer = explain(read(folder(tmp_path, trained(5), *events, info=info)))
    assert answer.cause == "checkpoint_failed"
    assert "The last 3 attempts to save failed, and there is none: what was trained since is not saved" in answer.text
    saved = event("checkpoint_saved", 5, path="x", bytes=1)
    answer = explain(read(folder(tmp_path / "later", trained(5), *events, saved, info=info)))
    assert "is not saved" not in answer.text


def test_comparison_shows_what_differs_only():
    first = flat({"train": {"epochs": 3, "steps": None}, "seed": 1, "env": {}})
    second = flat({"train": {"epochs": 4, "steps": None}, "seed": 1, "env": {}})
    assert differences([first, second]) == {"train.epochs": [3, 4]}


def test_values_of_the_run_file_are_shown_as_they_were_meant(tmp_path):
    (tmp_path / "run.yaml").write_text("reduce: {overlap: off}\nlaunch: {slurm: {time: 10:30:00}}\n")
    assert flat(run_config(tmp_path / "run.yaml")) == {"reduce.overlap": "off", "launch.slurm.time": "10:30:00"}


def test_comparison_of_two_folders(tmp_path):
    runs = [
        read(folder(tmp_path / str(n), trained(1, loss=n), event("eval", 1, metrics={"accuracy": n / 10})))
        for n in (1, 2)
    ]
    result = compare(runs)
    assert result["results"]["final_loss"] == [1, 2]
    assert result["results"]["accuracy"] == [0.1, 0.2]
    assert len(set(result["runs"])) == 2
    rows = dict(tables(result))["Results"]
    names = [name for name, *_ in rows]
    assert ["training loss", "1", "2"] in rows and ["validation accuracy", "0.1", "0.2"] in rows
    assert not any("_" in name for name in names), "words, not the keys of --json"
    assert page.number("early_stop", "state") == "early stop" and page.number("a_b", "name") == "a_b"


def test_a_comparison_takes_values_as_they_are(tmp_path, cli):
    made = {name: folder(tmp_path / str(place), trained(1)) for place, name in enumerate(("a[/x]", "v[red]"))}
    for name, run in made.items():
        run.run_yaml.write_text(f"name: {name!r}\ntask_args: {{data: {name!r}}}\n")
    said = cli("compare", *(run.path for run in made.values()), "-o", tmp_path / "page.html").out
    assert "a[/x]" in said and "v[red]" in said and "task_args.data" in said
    html = (tmp_path / "page.html").read_text()
    assert "What differs in the run files" in html and "training loss" in html and "v[red]" in html


def test_pictures_need_a_folder(tmp_path):
    (tmp_path / "plots").touch()
    sections = page.make_sections(read(folder(tmp_path / "run", trained(1))))
    with pytest.raises(UserError, match="File exists"):
        page.save_pictures(sections, tmp_path / "plots")


@pytest.mark.parametrize(("end", "heat"), [(99, {"heat"}), (6, set())], ids=["long", "short: its heat map is noise"])
def test_every_chart_of_the_page_is_a_picture_too(tmp_path, cli, end, heat):
    attempts = [attempt(1, 0, end, **DONE)]
    run_dir = folder(tmp_path, *(trained(step) for step in range(1, 6)), info={"attempts": attempts})
    np.savez(run_dir.monitor / "heat.npz", excess=np.ones((2, 3)))
    html, *pictures = map(Path, cli("report", run_dir.path, "--svg", tmp_path / "plots").out.split())
    shown = set(re.findall(r'<section id="(\w+)"', html.read_text()))
    assert {path.stem for path in pictures} == shown and {"loss", "phases", "attempts"} <= shown
    assert shown & {"heat"} == heat
    assert all("<path" in path.read_text() for path in pictures)


def test_without_matplotlib_the_report_has_tables_and_the_line_to_install_it(tmp_path, cli, monkeypatch):
    for module in (drawing, page):
        monkeypatch.setattr(module, "can_draw", lambda: False)
    run_dir = folder(tmp_path, *(trained(step) for step in range(1, 6)), info={"attempts": [attempt(1, 0, 99, **DONE)]})
    np.savez(run_dir.monitor / "heat.npz", excess=np.array([[0.0, 0.0, 0.0], [0.0, 0.5, 0.5]]))
    said = cli("report", run_dir.path)
    assert said.out.strip().endswith("report.html") and "pip install 'hpctrain[report]'" in said.err
    text = (run_dir.path / "report.html").read_text()
    assert "<svg" not in text and "pip install &#39;hpctrain[report]&#39;" in text
    assert text.count("<details open>") == len(re.findall('<section id="', text))
    assert re.search(r"<td>1</td>\s*<td>50</td>\s*<td>50</td>", text)
    assert (
        "pictures need matplotlib"
        in cli("report", run_dir.path, "--svg", tmp_path / "plots", code=ExitCode.USER_ERROR).err
        and not (tmp_path / "plots").exists()
    )


def test_a_page_of_a_large_run_stays_small(tmp_path):
    phases = [f"phase {number}" for number in range(9)]
    events = [
        {**trained(step, loss=step % 7), "seconds": dict.fromkeys(phases, 0.1 + step % 3)} for step in range(1, 3000)
    ]
    scores = [event("eval", step, metrics={f"m{number}": step * number for number in range(9)}) for step in range(999)]
    data = read(folder(tmp_path, *events, *scores, info={"attempts": [attempt(1, 0, 3000, **DONE)]}))
    heat = np.random.default_rng(0).normal(size=(64, 120))
    text = page.render(data, explain(data), page.make_sections(data, excess=heat))
    assert text.count("<svg") == 9 and len(text.encode()) < 2_000_000


def test_shrinking_a_map_keeps_the_hot_spot():
    values = np.zeros((1000, 700))
    values[777, 555] = 9
    small = shrink(values)
    assert small.shape == (64, 120)
    assert small.max() == 9 and (small > 0).sum() == 1


def test_hours_of_ranks_are_each_attempts_own(tmp_path):
    """Attempts of different lengths and numbers of ranks; the records win over the events."""
    first, second = attempt(1, 0, 3600, **DONE), attempt(2, 7200, 9000, **DONE)
    started = [event("run_started", 0, at=0, ranks=4), event("run_started", 0, attempt=2, at=7200, ranks=8)]
    data = read(folder(tmp_path / "a", *started, info={"attempts": [first, second]}))
    assert rank_hours(data, make_spans(data)) == pytest.approx(4 * 1.0 + 8 * 0.5)
    assert summarize(data)["rank_hours"] == pytest.approx(8.0)
    data = read(folder(tmp_path / "b", *started, info={"attempts": [{**first, "ranks": 2}, second]}))
    assert rank_hours(data, make_spans(data)) == pytest.approx(2 * 1.0 + 8 * 0.5)
    data = read(folder(tmp_path / "c", started[0], info={"attempts": [first, second]}))
    assert rank_hours(data, make_spans(data)) is None, "nobody says how many ranks the second one had"


def test_a_hang_of_an_earlier_attempt_explains_nothing(tmp_path):
    hang = event("hang", 3, sentence="rank 1 does not move")
    one, two = {"attempt": 1, "started": BEGIN}, {"attempt": 2, "started": BEGIN + 50}
    data = read(folder(tmp_path / "a", trained(3), hang, info={"attempts": [one]}))
    assert explain(data).cause == "hang"
    data = read(folder(tmp_path / "b", trained(3), hang, trained(4, 2, at=60), info={"attempts": [one, two]}))
    assert explain(data).cause == "running"


def test_a_report_that_cannot_be_written_is_wrong_input(tmp_path, cli):
    """It was a failure, which the same command was said to resume."""
    (tmp_path / "events.jsonl").touch()
    for words in (["report", str(tmp_path)], ["compare", str(tmp_path)]):
        assert (
            "x.html cannot be written: No such file or directory\n  fix: choose another"
            in cli(*words, "-o", tmp_path / "nowhere" / "x.html", code=64).err
        )


def test_energy_is_the_newest_of_each_attempt(tmp_path):
    found = [
        event("devices", 0, gpu_joules=1e6, cpu_joules=None),
        event("devices", 5, gpu_joules=3.6e6, cpu_joules=1.8e6),
        event("devices", 5, 2, gpu_joules=3.6e6, ranks=[{"rank": 0, "host": "n1", "watts": 640.0, "slowed": ["heat"]}]),
    ]
    data = read(folder(tmp_path, *found))
    summary = summarize(data)
    assert summary["kwh"] == 2.5
    [gpu] = summary["devices"]
    assert (gpu["rank"], gpu["watts"], gpu["slowed"]) == (0, 640.0, "heat")
    shown = page.render(data, explain(data), [])
    assert "kWh<b>2.5</b>" in shown and "<h2>GPUs</h2>" in shown
    assert summarize(read(folder(tmp_path / "none")))["kwh"] is None


def test_traces_and_memory_snapshots_are_linked(tmp_path):
    run = folder(tmp_path)
    for name in ("profile/rank-00000-from-step-000000003.pt.trace.json", "monitor/memory-1-3.pickle"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    data = read(run)
    shown = page.render(data, explain(data), [])
    assert re.findall('<a href="([^"]*)"', shown) == [
        "profile/rank-00000-from-step-000000003.pt.trace.json",
        "monitor/memory-1-3.pickle",
    ]
    assert "ui.perfetto.dev" in shown and "pytorch.org/memory_viz" in shown
    apart = page.render(data, explain(data), [], folder=run.path.parent / "pages")
    assert f'<a href="../{run.path.name}/monitor/memory-1-3.pickle"' in apart, "a page elsewhere has links too"


def test_a_folder_may_have_any_name(tmp_path, cli):
    run_dir = RunDir(tmp_path / os.fsdecode(b"caf\xe9"))
    run_dir.create()
    Attempts(run_dir).begin()
    said = cli("report", run_dir.path).out
    assert "caf\\udce9" in said + (run_dir.path / "report.html").read_text()

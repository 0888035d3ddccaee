"""What events come to, in bounded memory, whatever attempts repeat."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest

from hpctrain.run.attempts import Attempt
from hpctrain.run.events import Eval, RunFinished, Train, decode
from hpctrain.run.progress import CURVE_POINTS, Progress, ProgressCurve
from hpctrain.run.run_status import outcome


def event(name: str, step: int, attempt: int = 1, at: float | None = None, **fields: Any) -> dict[str, Any]:
    return {"time": float(step if at is None else at), "event": name, "step": step, "attempt": attempt, **fields}


def trained(step: int, attempt: int = 1, at: float | None = None, loss: float | None = 1.0) -> dict[str, Any]:
    return event("train", step, attempt, at, loss=loss, lr=0.1, steps=10, seconds={"forward": 5.0})


def progress(*events: dict[str, Any]) -> Progress:
    made = Progress()
    for each in events:
        add(made, each)
    return made


def add(made: Progress, event: dict[str, Any]) -> None:
    for each in decode(json.dumps(event).encode()):
        made.add(each)


def test_steps_that_are_computed_again_do_not_count():
    made = progress(
        event("run_started", 0, total_steps=100),
        *(trained(step, loss=9.0) for step in (10, 20, 30)),
        event("resumed", 10, attempt=2, at=40),
    )
    assert (made.step, made.total_steps, made.attempt) == (10, 100, 2)
    assert made.curves["loss"].means() == [9.0]
    add(made, trained(40, attempt=1, at=41))  # a fenced rank that writes on
    assert made.step == 10
    add(made, trained(20, attempt=2, at=50, loss=3.0))
    assert (made.step, made.curves["loss"].means()) == (20, [9.0, 3.0])


def test_the_step_at_which_an_attempt_takes_over_still_counts():
    before, resumed = [trained(10), event("eval", 10, metrics={"accuracy": 0.5})], event("resumed", 10, attempt=2)
    for made in (progress(*before, resumed), progress(resumed, *before)):  # files may interleave in any way
        train, evaluation = made.newest(Train), made.newest(Eval)
        assert train is not None and evaluation is not None and train.step == evaluation.step == 10


def test_steps_that_one_attempt_computes_again_do_not_count_either():
    """A program of one's own may train twice within an attempt that a supervisor counts."""
    again = event("run_started", 10, at=40)
    made = progress(event("run_started", 0), *(trained(step, loss=9.0) for step in (10, 20, 30)), again)
    assert (made.step, made.first_step, made.curves["loss"].means()) == (10, 10, [9.0])
    assert made.steps_per_s == 1.0, "of the attempt, in which it has been measured"


def test_the_rate_is_that_of_the_newest_intervals_of_this_attempt():
    made = progress(trained(10, at=0))
    assert made.steps_per_s == pytest.approx(2.0), "10 steps in 5 s"
    made = progress(*(trained(step, at=step) for step in range(10, 500, 10)))
    assert made.steps_per_s == pytest.approx(1.0)
    for step in range(500, 1000, 10):
        add(made, trained(step, at=490 + (step - 490) / 4))
    assert made.steps_per_s == pytest.approx(4.0)
    add(made, event("run_started", 990, attempt=2, at=10_000))
    add(made, trained(1000, attempt=2, at=10_001))
    assert made.steps_per_s == pytest.approx(2.0)


def test_the_newest_sixteen_intervals_make_the_rate():
    slow = [trained(10 * number, at=100.0 * number) for number in range(1, 4)]
    quick = [trained(30 + 10 * number, at=300.0 + number) for number in range(1, 16 + 1)]
    assert progress(*slow, *quick).steps_per_s == 10.0
    assert progress(*slow, quick[0]).steps_per_s == pytest.approx(30 / 201)


def test_findings_stand_until_they_are_cleared_or_the_attempt_ends():
    def found(state, rank, attempt=1):
        return event("straggler", 5, attempt, kind="rank", ranks=[rank], state=state, sentence=f"rank {rank} is slow")

    made = progress(found("confirmed", 1), found("confirmed", 2), found("cleared", 1))
    assert [each.ranks for each in made.findings.values()] == [(2,)]
    add(made, event("run_started", 3, attempt=2))
    add(made, found("confirmed", 1))
    assert not made.findings
    add(made, found("confirmed", 1, attempt=2))
    assert [each.ranks for each in made.findings.values()] == [(1,)]


def test_a_finding_that_is_read_before_its_attempt_s_begin_stands():
    """The monitor writes a file of its own: the files may interleave in any way."""
    found = event("straggler", 5, 2, kind="rank", ranks=[1], state="confirmed", sentence="rank 1 is slow")
    made = progress(event("run_started", 0), found, event("run_started", 3, attempt=2))
    assert [each.ranks for each in made.findings.values()] == [(1,)]


def test_a_hang_stands_until_a_step_is_made():
    made = progress(trained(10), event("hang", 10, at=70, sentence="rank 1 does not move"))
    assert made.hang is not None and made.warnings[-1].text == "rank 1 does not move"
    add(made, trained(20, at=80))
    assert made.hang is None


@pytest.mark.parametrize(
    ("code", "text"), [("time_limit", "asked to stop before the time limit"), ("stopped", "asked to stop by ada")]
)
def test_a_stop_for_the_time_limit_is_no_persons(code, text):
    (warned,) = progress(event("stop_requested", 5, by="ada", code=code)).warnings
    assert warned.text == text and warned.is_orderly


def test_warnings_are_the_newest():
    made = progress(
        *(event("checkpoint_failed", step, error=f"disk full {step}") for step in range(100)),
        event("resumed", 3, attempt=2, rejected=[{"step": 7, "reason": "its checksum is wrong"}]),
    )
    assert len(made.warnings) == 8
    assert "step 7 was not used: its checksum is wrong" in made.warnings[-1].text


def test_saves_that_fail_are_told_until_one_succeeds():
    failed = [event("checkpoint_failed", step, failures=step - 3, error="disk full") for step in (4, 5, 6)]
    saved = event("checkpoint_saved", 3, path="x", bytes=1, stall_s=0.0, write_s=0.0)
    made = progress(event("run_started", 0), saved, *failed)
    assert made.failing_saves == (
        "3 checkpoints in a row failed, the last at step 6; the newest is from step 3: disk full"
    )
    assert made.warnings[0].text == "the checkpoint could not be written: disk full"
    assert made.warnings[-1].text == "the checkpoint could not be written (3 checkpoints in a row): disk full"
    add(made, event("checkpoint_saved", 7, path="x", bytes=1, stall_s=0.0, write_s=0.0))
    assert made.failing_saves is None
    old = progress(event("checkpoint_failed", 4, error="disk full"))
    assert old.failing_saves == "1 checkpoint failed, the last at step 4; there is none: disk full"


def test_a_store_that_is_away_is_told_until_a_copy_arrives():
    stored = event("checkpoint_stored", 3, path="s3://b/x/step-3", bytes=1, write_s=0.1)
    made = progress(event("run_started", 0), stored, event("store_away", 6, path="s3://b/x", error="SlowDown"))
    assert made.store_away == "checkpoints do not reach s3://b/x; the newest there is from step 3: SlowDown"
    assert made.warnings[-1].text == "checkpoints do not reach s3://b/x: SlowDown"
    add(made, event("checkpoint_stored", 9, path="s3://b/x/step-9", bytes=1, write_s=0.1))
    assert made.store_away is None


def test_a_curve_keeps_means_and_bounds():
    curve = ProgressCurve()
    for step in range(1, 100_001):
        curve.add(step, 1.0 if step <= 50_000 else 3.0)
    curve.add(100_001, math.nan)
    means = curve.means()
    assert CURVE_POINTS / 2 <= len(means) <= CURVE_POINTS
    assert set(means[: len(means) // 2 - 2]) == {1.0} and means[-1] == 3.0
    curve.cut(25_000)
    assert len(curve.means()) == pytest.approx(len(means) / 4, abs=2)


def test_a_loss_that_is_not_finite_is_no_point():
    made = progress(trained(10, loss=None), trained(20, loss=2.0))
    assert made.curves["loss"].means() == [2.0]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_events():
    made = progress(event("run_started", 0, total_steps=10**7))

    def feed(first, last):
        for step in range(first, last):
            add(made, trained(step, at=step, loss=1 / step))
            if step % 100 == 0:
                add(made, event("eval", step, metrics={"accuracy": 0.5}))
                add(made, event("checkpoint_failed", step, error="full"))

    feed(1, 20_000)
    tracemalloc.start()
    feed(20_000, 40_000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 200_000


@pytest.mark.parametrize(
    ("attempts", "finished", "found"),
    [
        ([], None, "unknown"),
        ([{"attempt": 1}], None, "running"),
        ([{"attempt": 2}], (1, "stop_requested"), "running"),
        ([{"attempt": 1}], (1, "completed"), "completed"),
        ([{"attempt": 1}], (1, "a reason of a newer version"), "unknown"),
        (
            [{"attempt": 1, "ended": 1.0, "verdict": {"action": "requeue", "exit_code": 70, "reason": ""}}],
            None,
            "failed",
        ),
        ([{"attempt": 1, "ended": 1.0, "verdict": {"action": "requeue", "exit_code": 75, "reason": ""}}], None, "stop"),
        ([{"attempt": 1, "ended": 1.0, "verdict": {"action": "stop", "exit_code": 75, "reason": ""}}], None, "stop"),
        ([{"attempt": 1, "ended": 1.0}], None, "unknown"),
    ],
)
def test_outcome(attempts, finished, found):
    told = RunFinished(step=1, attempt=finished[0], reason=finished[1]) if finished else None
    assert outcome([Attempt.from_json(entry) for entry in attempts], None, told) == found


def test_before_any_event_nothing_is_known():
    made = Progress()
    assert (made.attempt, made.step, made.total_steps, made.steps_per_s, made.left_s, made.hang) == (0, *[None] * 5)
    assert made.failing_saves is None and made.last_time is None and made.num_events == 0
    assert made.store_away is None


def test_seconds_left_are_steps_left_at_the_rate():
    made = progress(event("run_started", 0, total_steps=100), trained(10, at=0), trained(30, at=10))
    assert (made.steps_per_s, made.left_s) == (2.0, 35.0)
    assert progress(trained(10, at=0), trained(30, at=10)).left_s is None, "nobody says how long the run is"


def test_a_clock_that_stands_still_or_goes_back_gives_no_rate():
    assert progress(trained(10, at=5), trained(20, at=5)).steps_per_s is None
    assert progress(trained(10, at=5), trained(20, at=4)).steps_per_s is None
    assert progress(event("train", 10, steps=10, seconds={})).steps_per_s is None


def test_the_newest_time_is_the_latest_whatever_the_order_of_files():
    made = progress(trained(10, at=50), event("straggler", 5, at=20, kind="rank", ranks=[1], state="suspect"))
    assert (made.last_time, made.num_events) == (50.0, 2)


def test_an_older_attempt_that_still_writes_takes_nothing_over():
    made = progress(event("run_started", 20, attempt=2), event("resumed", 5, attempt=1, at=30))
    assert (made.attempt, made.first_step) == (2, 20)
    found = event("straggler", 5, 1, kind="rank", ranks=[1], state="confirmed", sentence="rank 1 is slow")
    add(made, found)
    assert not made.findings, "it is about ranks that are gone"


def test_findings_about_all_ranks_replace_each_other_and_those_about_one_do_not():
    def told(kind, *ranks):
        return event("straggler", 5, kind=kind, ranks=list(ranks), state="confirmed")

    made = progress(told("many", 1, 2), told("many", 1, 3), told("rank", 1), told("rank", 2), told("host", 4, 5))
    assert [each.ranks for each in made.findings.values()] == [(1, 3), (1,), (2,), (4, 5)]


def test_a_hang_of_an_earlier_attempt_or_before_the_last_step_is_over():
    hang = event("hang", 10, at=70, sentence="rank 1 does not move")
    assert progress(hang).hang is not None, "it never made a step"
    assert progress(hang, event("run_started", 10, attempt=2, at=80)).hang is None
    assert progress(trained(10, at=70), hang).hang is None


def test_a_save_that_failed_in_an_earlier_attempt_is_no_warning_now():
    failed = event("checkpoint_failed", 4, error="disk full")
    assert progress(failed, event("run_started", 4, attempt=2, at=5)).failing_saves is None


def test_a_curve_is_whole_up_to_its_bound_and_halved_beyond():
    curve = ProgressCurve()
    for step in range(CURVE_POINTS):
        curve.add(step, float(step))
    assert curve.means() == [float(step) for step in range(CURVE_POINTS)]
    curve.add(CURVE_POINTS, 1.0)
    assert len(curve.points) == CURVE_POINTS // 2 + 1 and curve.means()[:2] == [0.5, 2.5]
    curve.add(CURVE_POINTS + 1, 3.0)
    assert curve.means()[-1] == 2.0, "points join two values now"
    curve.cut(3)
    assert curve.means() == [0.5, 2.5], "up to step 3, which stays"


def test_the_warning_of_a_resume_names_the_newest_checkpoint_that_was_not_used():
    rejected = [{"step": 9, "reason": "its checksum is wrong"}, {"step": 7, "reason": "a shard is missing"}]
    made = progress(event("resumed", 3, attempt=2, rejected=rejected))
    assert made.warnings[-1].text == "the checkpoint of step 9 was not used: its checksum is wrong"


def test_a_hang_at_the_time_of_a_step_is_over():
    assert progress(trained(10, at=70), event("hang", 10, at=70, sentence="rank 1 does not move")).hang is None

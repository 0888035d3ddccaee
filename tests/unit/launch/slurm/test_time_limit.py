"""When ranks must stop for a job's time limit, which anyone may change."""

from __future__ import annotations

import errno
import math
import time
from signal import SIGTERM, SIGUSR1

import pytest

from hpctrain.config.sections import Config, LaunchConfig
from hpctrain.errors import NoRequeue
from hpctrain.launch.engines.slurm import client
from hpctrain.launch.engines.slurm.submission import signal_s
from hpctrain.launch.engines.slurm.time_limit import TimeLimit, start_s
from hpctrain.run.attempts import Attempts
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import RunStarted
from hpctrain.run.folder import RunDir
from tests.support.faults import FileServer


def limit(whole_s: float, left_s: float, signal_s: float = 120.0, took_s: float = 0.0) -> TimeLimit:
    """The limit of a job with so much time in all and left, as Slurm said just now."""
    now = time.time()
    return TimeLimit("7", signal_s, took_s, now + left_s - whole_s, now + left_s, next_look=now + 3600)


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm does not answer."""
    monkeypatch.setattr(client, "job_fields", lambda job: {})


@pytest.mark.parametrize(
    ("whole_s", "left_s", "received", "due"),
    [
        (3600, 1800, [], 0),
        (3600, 1800, [SIGTERM], SIGTERM),
        (3600, 1000, [SIGUSR1], SIGUSR1),  # scancel --signal, or a preemption
        (3600, 170, [SIGUSR1], SIGUSR1),  # Slurm, a little early
        (3600, 119, [], SIGUSR1),  # Slurm's signal is lost, or its limit was lowered
        (120, 115, [SIGUSR1], 0),  # lowered from 20 minutes: Slurm sends it at once
        (120, 115, [SIGUSR1, SIGTERM], SIGTERM),
        (120, 59, [SIGUSR1], SIGUSR1),
        (120, 59, [], SIGUSR1),
        (60, 55, [SIGUSR1], 0),
        (60, 29, [SIGUSR1], SIGUSR1),
    ],
)
def test_ranks_stop_when_the_rest_of_the_limit_is_needed(whole_s, left_s, received, due):
    assert limit(whole_s, left_s).due(received) == due


def test_without_an_answer_the_signal_counts(monkeypatch):
    monkeypatch.setattr(client, "job_fields", lambda job: {})
    unknown = TimeLimit("7", 120.0)
    assert unknown.due([]) == 0 and unknown.due([SIGUSR1]) == SIGUSR1
    assert unknown.left_s() == float("inf") and unknown.has_room()
    unknown.require_room()


def test_slurm_is_asked_again_as_the_limit_may_change(monkeypatch):
    def shown(seconds):
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + seconds))

    answers = [{"StartTime": shown(-600), "EndTime": shown(3000)}, {"StartTime": shown(-600), "EndTime": shown(100)}]
    monkeypatch.setattr(client, "job_fields", lambda job: answers.pop(0))
    found = TimeLimit("7", 120.0)
    assert found.due([]) == 0 and len(answers) == 1
    found.next_look = 0.0
    assert found.due([]) == SIGUSR1


def test_a_signal_is_a_reason_to_ask(monkeypatch):
    found, lowered = limit(1200, 1190), limit(120, 110)
    times = {"StartTime": lowered.begin, "EndTime": lowered.end}
    fields = {name: time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when)) for name, when in times.items()}
    asked: list[str] = []
    monkeypatch.setattr(client, "job_fields", lambda job: asked.append(job) or fields)
    assert found.due([SIGUSR1]) == 0 and found.due([SIGUSR1]) == 0 and asked == ["7"]


def test_a_limit_without_room_for_a_step_is_refused_before_any_rank_starts():
    limit(120, 119, took_s=50).require_room()
    with pytest.raises(NoRequeue, match="is 2 min 00 s, of which the start takes 1 min 01 s and stopping 1 min 00 s"):
        limit(120, 119, took_s=61).require_room()


def test_nothing_starts_again_just_before_the_limit():
    assert limit(3600, 200, took_s=60).has_room()
    assert not limit(3600, 170, took_s=60).has_room()


def test_the_start_takes_what_the_quickest_attempt_took(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.create()
    assert start_s(run) == 0.0
    for took_s in (30.0, 20.0):
        number = Attempts(run).begin()
        began = Attempts(run).all()[-1].started or 0.0
        EventWriter(run.events, print).append(RunStarted(step=0, attempt=number, time=began + took_s, ranks=1))
    assert start_s(run) == pytest.approx(20.0, abs=0.01)
    monkeypatch.setattr("hpctrain.system.retry.FILE_PAUSES_S", (0.0,))
    FileServer(errno.EIO, "events.jsonl", "open", times=math.inf).install(monkeypatch)
    assert (start_s(run), signal_s(Config(name="r", launch=LaunchConfig(command=("true",))), run)) == (0.0, 300)


def test_a_limit_that_was_lifted_stops_nobody(monkeypatch):
    monkeypatch.setattr(client, "job_fields", lambda job: {"StartTime": "2026-01-01T00:00:00", "EndTime": "Unknown"})
    lifted = limit(3600, 100)
    lifted.next_look = 0.0
    assert lifted.due([]) == 0 and lifted.has_room()

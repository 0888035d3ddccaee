"""Requests to stop set a flag; errors become one sentence. One process, no MPI; tests/dist has the ranks."""

from __future__ import annotations

import bdb
import os
import signal
from types import SimpleNamespace

import pytest

from hpctrain.comm.world import alone
from hpctrain.errors import ExitCode, NoRequeue, UserError
from hpctrain.rank.session import exit_code, message
from hpctrain.rank.stop_requests import StopRequests
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import StopRequested
from hpctrain.run.folder import RunDir
from hpctrain.run.run_view import RunView
from hpctrain.run.stop_request import StopRequest, request_stop
from hpctrain.system.signals import InterruptibleStopSignals, StopSignals
from hpctrain.train.hooks import StopReason
from hpctrain.train.state import TrainState


@pytest.fixture
def signals():
    made = StopSignals()
    made.install()
    yield made
    made.restore()


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    return made


def steps_until_stop(signals, run_dir, ask) -> int:
    """Steps that a run of one rank makes after somebody asks it to stop."""
    trainer = SimpleNamespace(world=alone(), state=TrainState(step=5))
    hook = StopRequests(signals, run_dir, EventWriter(run_dir.events, print).append)
    hook.before_fit(trainer)
    assert hook.after_step(trainer, None) is None
    hook.next_look = 0.0  # the next look is due
    ask()
    reasons = [hook.after_step(trainer, None) for _ in range(2)]
    hook.after_fit(trainer, StopReason.REQUESTED)
    hook.close()
    return reasons.index(StopReason.REQUESTED) + 1


def test_a_signal_stops_after_the_step(signals, run_dir):
    assert steps_until_stop(signals, run_dir, lambda: os.kill(os.getpid(), signal.SIGUSR1)) == 1
    event = RunView(run_dir.path).events()[0]
    assert isinstance(event, StopRequested) and event.by == "signal SIGUSR1"


def test_the_stop_file_stops_after_the_step_and_says_who_asked(signals, run_dir):
    assert steps_until_stop(signals, run_dir, lambda: request_stop(run_dir, StopRequest("hpctrain stop by ada"))) == 1
    (event,) = RunView(run_dir.path).events()
    assert isinstance(event, StopRequested)
    assert (event.by, event.code, event.step) == ("hpctrain stop by ada", "stopped", 5)


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    made = StopSignals()
    made.install()
    made.restore()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_signal_that_is_ignored_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    made = StopSignals()
    made.install()
    os.kill(os.getpid(), signal.SIGHUP)
    made.restore()
    signal.signal(signal.SIGHUP, former)
    assert made.received == []


def test_what_a_job_script_ignores_until_there_is_a_handler_is_handled():
    former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    made = StopSignals()
    made.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    made.restore()
    signal.signal(signal.SIGUSR1, former)
    assert made.received == [signal.SIGUSR1]


def test_a_second_interrupt_ends_a_process_that_nobody_supervises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and CI have it ignored
    made = InterruptibleStopSignals()
    made.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert made.first == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        made.restore()
        signal.signal(signal.SIGINT, before)


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as again:
        return again


def test_errors_of_ours_speak_for_themselves():
    error = caught(NoRequeue("what", "fix"))
    assert (message(error), exit_code(error)) == (("what", "fix"), ExitCode.DO_NOT_REQUEUE)
    assert exit_code(caught(UserError("what", "fix"))) == ExitCode.USER_ERROR


def test_other_errors_are_told_with_type_and_place():
    error = caught(ValueError("bad\n  sample"))
    assert message(error)[0].startswith("ValueError: bad sample (test_stop_requests.py:")
    assert exit_code(error) == ExitCode.FAILURE
    cuda = caught(AssertionError("Torch not compiled with CUDA enabled"))
    assert "leave .cuda() and .to() out" in message(cuda)[1] and exit_code(cuda) == ExitCode.USER_ERROR
    unprintable = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    for users in (SystemExit(0), EOFError("EOF when reading a line"), unprintable):  # by exit, input and print
        assert exit_code(caught(users)) == ExitCode.USER_ERROR
    assert "sys.exit(0)" in message(caught(SystemExit(0)))[0]
    for left in (KeyboardInterrupt(), bdb.BdbQuit()):  # the latter by q in a breakpoint
        assert message(caught(left))[0].startswith("interrupted before")

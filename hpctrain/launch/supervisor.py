"""The process that starts ranks and outlives them. No MPI, no framework; it works for any launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpctrain.errors import ExitCode, HpctrainError, Replaced
from hpctrain.launch.attempt import Attempt, Launch, Limits
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord, merge
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.verdict import PREFLIGHT, Action, Verdict, replaced
from hpctrain.system.files import write_atomically
from hpctrain.system.output import say
from hpctrain.system.signals import StopSignals


def supervise(
    run_dir: RunDir,
    make_launch: Callable[[int], Launch],
    limits: Limits,
    facts: Mapping[str, Any],
    run_yaml: str | None = None,
    verbose: bool = False,
    by_person: Callable[[int], bool] | None = None,
) -> Verdict:
    """One attempt at a run, from taking the folder to the recorded verdict.

    Args:
        run_dir: its folder; made if need be.
        make_launch: what to start, given the attempt's number; called once the folder is ours, and may take long.
            Where it raises one of our errors nothing is started, and the error is the verdict.
        limits: times and counts.
        facts: for the attempt's entry in run.json (ranks, hosts, job id, versions, git commit).
        run_yaml: the resolved run file, kept in the folder.
        verbose: show what the launcher says.
        by_person: tells signals of people from those of the scheduler.

    Returns:
        The verdict; the caller prints it with ``report`` and exits with its code, or requeues.

    Raises:
        UserError: the folder is in use by another live run, or cannot be made.
        RunFailed: the folder cannot be written.
    """
    signals = StopSignals()
    signals.install()
    run_dir.create()
    lock = LiveLock(run_dir, myself())
    lock.acquire()
    try:
        words: list[LastWord] = []
        with lock.kept():  # by a thread as long as nothing is started; then by the attempt at each look
            number = run_dir.begin_attempt(host=socket.gethostname(), job_id=os.environ.get("SLURM_JOB_ID"), **facts)
            if run_yaml is not None:
                write_atomically(run_dir.run_yaml, run_yaml.encode(), run_dir.path)
            launch = prepare(make_launch, number)
        launch = lost(lock, number) or launch  # that took its time
        if isinstance(launch, Verdict):
            verdict = launch
        else:
            attempt = Attempt(launch, run_dir, number, lock, signals, limits, verbose)
            attempt.by_person = by_person or attempt.by_person
            verdict, words = attempt.run()
        verdict = lost(lock, number) or verdict
        record(run_dir, number, verdict, words)
        return verdict
    finally:
        lock.release()
        signals.restore()


def prepare(make_launch: Callable[[int], Launch], number: int) -> Launch | Verdict:
    """What to start, or the verdict on an attempt that cannot start."""
    try:
        return make_launch(number)
    except HpctrainError as error:
        return Verdict(Action.FAIL, error.exit_code, error.what, error.fix, cause=PREFLIGHT)


def lost(lock: LiveLock, number: int) -> Verdict | None:
    """The verdict on an attempt that another has replaced; none on one that has its run folder still."""
    try:
        lock.check()
        lock.run_dir.check_fence(number)
    except Replaced as error:
        return replaced(error)
    except OSError as error:  # that it cannot be seen changes nothing
        say(f"whether a newer attempt has begun cannot be seen: {error}")
    return None


def record(run_dir: RunDir, number: int, verdict: Verdict, words: Sequence[LastWord]) -> None:
    """Writes verdict and last words into the run folder; on a full disk the exit code still tells the verdict."""
    try:
        merge(run_dir, number, words, verdict.to_json())
        run_dir.end_attempt(number, verdict=verdict.to_json(), hosts=sorted({word.host for word in words}))
    except HpctrainError as error:
        if verdict.exit_code in (ExitCode.DONE, ExitCode.STOPPED):  # else the verdict is what the user must read
            say(str(error))


def report(verdict: Verdict, run_dir: RunDir) -> None:
    """One sentence on how the attempt ended, and what to do."""
    if verdict.action is Action.DONE:
        return
    fix = f"\n  fix: {verdict.fix}" if verdict.fix else ""
    logs = "" if verdict.exit_code in (ExitCode.STOPPED, ExitCode.USER_ERROR) else f"\n  logs: {run_dir.logs}"
    say(f"{verdict.reason}{fix}{logs}")

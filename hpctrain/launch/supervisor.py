"""The process that starts ranks and outlives them. No MPI, no framework; it works for any launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpctrain.errors import GENERAL, Code, ExitCode, HpctrainError, Replaced, code_of
from hpctrain.launch.attempt import Launch, Limits, WatchedAttempt
from hpctrain.launch.patience import Stopped
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.verdict import Action, Verdict, replaced
from hpctrain.system.output import say
from hpctrain.system.signals import StopSignals


def supervise(
    run_dir: RunDir,
    make_launch: Callable[[int], Launch],
    limits: Limits,
    facts: Attempt,
    run_yaml: str | None = None,
    verbose: bool = False,
    by_person: Callable[[int], bool] = WatchedAttempt.by_person,
) -> Verdict:
    """One attempt at a run, from taking the folder to the recorded verdict.

    Args:
        run_dir: its folder; made if need be.
        make_launch: what to start, given the attempt's number; called once the folder is ours, and may take long.
            If it raises one of our errors nothing is started, and the error is the verdict.
        limits: times and counts.
        facts: what is known of the attempt beforehand, for its entry in run.json.
        run_yaml: the resolved run file, kept in the folder.
        verbose: show what the launcher says.
        by_person: distinguishes signals of people from those of the scheduler.

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
            number = Attempts(run_dir).begin(facts, run_yaml)
            launch = prepare(make_launch, number)
        launch = lost(lock, number) or launch  # that took its time
        if isinstance(launch, Verdict):
            verdict = launch
        else:
            attempt = WatchedAttempt(launch, run_dir, number, lock, signals, limits, verbose, by_person)
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
    except Stopped as error:
        return Verdict(Action.STOP, error.exit_code, error.what, error.fix, code=error.code)
    except HpctrainError as error:
        code = code_of(error)
        code = Code.PREFLIGHT if code in GENERAL else code
        return Verdict(Action.FAIL, error.exit_code, error.what, error.fix, code=code, before_ranks=True)


def lost(lock: LiveLock, number: int) -> Verdict | None:
    """The verdict on an attempt that another has replaced; none on one that has its run folder still."""
    try:
        lock.check()
        Attempts(lock.run_dir).check_fence(number)
    except Replaced as error:
        return replaced(error)
    except OSError as error:  # that it cannot be seen changes nothing
        say(f"whether a newer attempt has begun cannot be seen: {error}")
    return None


def record(run_dir: RunDir, number: int, verdict: Verdict, words: Sequence[LastWord]) -> None:
    """Writes verdict and last words into the run folder; on a full disk the exit code still gives the verdict."""
    try:
        Attempts(run_dir).end(number, verdict, words)
    except HpctrainError as error:
        if verdict.exit_code in (ExitCode.DONE, ExitCode.STOPPED):  # else the verdict is what the user must read
            say(str(error))


def report(verdict: Verdict, run_dir: RunDir) -> bool:
    """One sentence on how the attempt ended, and what to do; False if it could not be written."""
    if verdict.action is Action.DONE:
        return True
    fix = f"\n  fix: {verdict.fix}" if verdict.fix else ""
    logs = "" if verdict.exit_code in (ExitCode.STOPPED, ExitCode.USER_ERROR) else f"\n  logs: {run_dir.logs}"
    return say(f"{verdict.reason}{fix}{logs}")

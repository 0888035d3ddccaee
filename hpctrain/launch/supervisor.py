"""The process that starts ranks and outlives them, attempt after attempt. No MPI, no framework; for any launcher."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from hpctrain.config.sections import Config
from hpctrain.errors import GENERAL, Code, ExitCode, HpctrainError, Replaced, code_of
from hpctrain.launch.attempt import Launch, Limits, WatchedAttempt
from hpctrain.launch.patience import Stopped, read_patiently
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.attempts import Attempts
from hpctrain.run.decision import starts_again
from hpctrain.run.events import Resumed, SnapshotSaved
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.stop_request import requested_stop
from hpctrain.run.verdict import Action, RunVerdict, replaced
from hpctrain.run.view import RunView
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
    again: Callable[[RunVerdict], Attempt | None] | None = None,
) -> RunVerdict:
    """A run from taking its folder to the last recorded verdict: attempts one after another in the same place.

    Args:
        run_dir: its folder; made if need be.
        make_launch: what to start, given the attempt's number; called with the lock held, and may take long.
            If it raises one of our errors nothing is started, and the error is the verdict.
        limits: times and counts.
        facts: what is known about the first attempt before it starts, for its entry in run.json.
        run_yaml: the resolved run file, kept in the folder.
        verbose: show what the launcher says.
        by_person: distinguishes signals of people from those of the scheduler.
        again: the facts of another attempt after a failed one, None if this place can serve no longer. By default
            there is one attempt.

    Returns:
        The verdict on the last attempt; the caller prints it with ``report`` and exits with its code, or requeues.

    Raises:
        UserError: the folder is in use by another live run, or cannot be made.
        RunFailed: the folder cannot be written.
    """
    signals = StopSignals()
    signals.install()
    run_dir.create()
    lock = LiveLock(run_dir, myself())
    lock.acquire()
    idle, step, number = 0, newest_step(run_dir, None), 0
    before: RunVerdict | None = None
    try:
        while True:
            words: list[LastWord] = []
            with lock.kept():  # by a thread as long as nothing is started; then by the attempt at each look
                if before is not None and (gone := lost(lock, number)) is not None:
                    return gone
                try:
                    number = Attempts(run_dir).begin(facts, run_yaml, forget_stop=before is None)
                except HpctrainError as error:
                    if before is None:
                        raise
                    say(f"not started again here: {error}")
                    return before
                launch = prepare(make_launch, number)
            launch = lost(lock, number) or launch  # that took its time
            if isinstance(launch, RunVerdict):
                verdict = launch
            else:
                attempt = WatchedAttempt(launch, run_dir, number, lock, signals, limits, verbose, by_person)
                verdict, words = attempt.run()
            with lock.kept():  # a slow file system or scheduler must not let the lock go stale
                verdict = lost(lock, number) or verdict
                record(run_dir, number, verdict, words)
                asked = bool(signals.received) or requested_stop(run_dir) is not None
                saved, step = step, newest_step(run_dir, step)
                idle = idle + 1 if step == saved else 0  # lost nodes are not counted by the verdict
                if again is None or idle >= limits.max_failures or not starts_again(verdict, asked):
                    return verdict
                found = again(verdict)
            if found is None:
                return verdict
            facts, before = found, verdict
            say(f"{verdict.reason}; starting again {begins(run_dir, step)}")
    finally:
        lock.release()
        signals.restore()


def newest_step(run_dir: RunDir, known: int | None) -> int | None:
    """Of the newest checkpoint; the one known before if it cannot be seen, which counts as no progress."""
    try:
        return read_patiently(run_dir.newest_checkpoint_step)
    except HpctrainError as error:
        say(str(error))
        return known


def prepare(make_launch: Callable[[int], Launch], number: int) -> Launch | RunVerdict:
    """What to start, or the verdict if the attempt cannot start."""
    try:
        return make_launch(number)
    except Stopped as error:
        return RunVerdict(Action.STOP, error.exit_code, error.what, error.fix, code=error.code)
    except HpctrainError as error:
        code = code_of(error)
        code = Code.PREFLIGHT if code in GENERAL else code
        return RunVerdict(Action.FAIL, error.exit_code, error.what, error.fix, code=code, before_ranks=True)


def lost(lock: LiveLock, number: int) -> RunVerdict | None:
    """The verdict if another attempt has replaced this one; None if it still holds its run folder."""
    try:
        lock.check()
        Attempts(lock.run_dir).check_fence(number)
    except Replaced as error:
        return replaced(error)
    except OSError as error:  # that it cannot be seen changes nothing
        say(f"whether a newer attempt has begun cannot be seen: {error}")
    return None


def record(run_dir: RunDir, number: int, verdict: RunVerdict, words: Sequence[LastWord]) -> None:
    """Writes verdict and last words into the run folder; on a full disk the exit code still gives the verdict."""
    try:
        read_patiently(lambda: Attempts(run_dir).end(number, verdict, words))
    except HpctrainError as error:
        if verdict.exit_code in (ExitCode.DONE, ExitCode.STOPPED):  # else the verdict is what the user must read
            say(str(error))


def report(verdict: RunVerdict, run_dir: RunDir, command: Sequence[str] = (), saves: bool = True) -> bool:
    """One sentence on how the run ended, and what to do; False if it could not be written.

    ``command`` resumes it; ``saves``: from a checkpoint of ours.
    """
    if verdict.action is Action.DONE:
        return True
    fix = f"\n  fix: {verdict.fix}" if verdict.fix else ""
    logs = "" if verdict.exit_code in (ExitCode.STOPPED, ExitCode.USER_ERROR) else f"\n  logs: {run_dir.logs}"
    resume = ""
    if command and verdict.exit_code is not ExitCode.USER_ERROR:
        where = f" {begins(run_dir, run_dir.newest_checkpoint_step())}" if saves else ""
        resume = f"\n  resume{where}: {shlex.join(command)}"
    return say(f"{verdict.reason}{fix}{logs}{resume}")


def begins(run_dir: RunDir, step: int | None) -> str:
    """Where the next attempt begins: with the checkpoint of a step, or with a newer snapshot on the nodes."""
    where = "from the beginning" if step is None else f"from step {step}"
    with suppress(HpctrainError, OSError):
        trained, progress = Attempts(run_dir).info().get("trained") or 0, RunView(run_dir.path).snapshot().progress
        kept = [progress.newest(SnapshotSaved), progress.newest(Resumed)]  # what was resumed from becomes its own
        steps = [each.step for each in kept if each and each.attempt >= trained and each.tier not in (None, "store")]
        if max(steps, default=0) > (step or 0):
            return f"from step {max(steps)} if its snapshot is whole, else {where}"
    return where


def choose(hosts: Sequence[str], out: Collection[str], config: Config) -> list[str] | None:
    """The nodes for the next attempt, the first ones that will do; None if too few are left. Pure.

    Args:
        hosts: of the allocation.
        out: those that are lost or to be left out.
        config: how many nodes are wanted, and how many suffice.
    """
    launch = config.launch
    left = [host for host in hosts if host not in out][: launch.nodes]
    least = min(launch.min_nodes or launch.nodes, launch.nodes)
    while len(left) >= least:
        if len(left) == launch.nodes or fits(config, len(left) * (launch.ranks_per_node or 1)):
            return left
        left = left[:-1]
    return None


def fits(config: Config, ranks: int) -> bool:
    """Whether another number of ranks computes the same run: the plan divides it, and the global batch stays."""
    batch_stays = bool(config.launch.command) or config.train.batch_per_rank is None
    return batch_stays and ranks % (config.parallel.tensor * config.parallel.pipeline) == 0

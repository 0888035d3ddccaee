"""The supervisor: starts a run's attempts one after another, under any launcher. No MPI, no framework."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpctrain.config.sections import Config
from hpctrain.errors import GENERAL, Code, ExitCode, HpctrainError, Replaced, code_of
from hpctrain.launch.attempt import Launch, Limits, WatchedAttempt
from hpctrain.launch.outage_retry import Stopped
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.decision import starts_again
from hpctrain.run.events import Resumed, SnapshotSaved
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.run_view import RunView
from hpctrain.run.stop_request import requested_stop
from hpctrain.run.verdict import Action, RunVerdict, replaced
from hpctrain.system.output import SHOWN_S, say
from hpctrain.system.retry import retry_or_fail
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
    received: list[int] | None = None,
) -> RunVerdict:
    """Supervises a run, from locking its folder to recording the last verdict; repeats failed attempts in place.

    Args:
        run_dir: the run folder; created if missing.
        make_launch: returns what to start, given the attempt's number. Called with the lock held; may take long.
            If it raises an HpctrainError, nothing is started and the error becomes the verdict.
        limits: timeouts, and when to give up.
        facts: what is known about the first attempt before it starts, for its entry in run.json.
        run_yaml: text of the resolved run file, which is stored in the folder.
        verbose: show the launcher's messages.
        by_person: whether a signal number comes from a person rather than the scheduler.
        again: given the verdict on a failed attempt, returns the facts of the next one, or None if no attempt can
            start here any more. Default: only one attempt.
        received: the stop signals that the caller has received, a list to which it adds later ones.

    Returns:
        The verdict on the last attempt. The caller prints it with ``report``, then exits with its code or requeues.

    Raises:
        UserError: the folder is in use by another live run, or cannot be made.
        RunFailed: the folder cannot be written.
    """
    signals = StopSignals(received)
    signals.install()
    run_dir.create()
    lock = LiveLock(run_dir, myself())
    lock.acquire()
    try:
        run = SupervisedRun(run_dir, lock, signals, make_launch, limits, run_yaml, verbose, by_person, again)
        return run.to_its_end(facts)
    finally:
        lock.release()
        signals.restore()


@dataclass
class SupervisedRun:
    """A run under supervision, whose folder is locked. See ``supervise`` for what the caller gives."""

    run_dir: RunDir
    lock: LiveLock
    """A thread renews it, except while ranks run: a slow file system or scheduler must not let it go stale."""
    signals: StopSignals
    make_launch: Callable[[int], Launch]
    limits: Limits
    run_yaml: str | None
    verbose: bool
    by_person: Callable[[int], bool]
    again: Callable[[RunVerdict], Attempt | None] | None
    first: int = 0
    """Number of the first attempt; 0 before it."""
    number: int = 0
    """Number of the current attempt."""
    step: int | None = None
    """Step of the newest checkpoint."""
    idle: int = 0
    """Attempts in a row without a new checkpoint; those that lost a node count too, which ``decide`` leaves out."""

    def to_its_end(self, facts: Attempt) -> RunVerdict:
        """Makes attempts, each with its facts, until none follows; returns the verdict on the last one."""
        self.step = newest_step(self.run_dir, None)
        self.begin(facts, forget_stop=True)
        while True:
            verdict = self.attempt()
            found = self.following(verdict)
            if isinstance(found, RunVerdict):
                return found
            say(f"{verdict.reason}; starting again {begins(self.run_dir, self.step)}", SHOWN_S)
            try:
                self.begin(found, forget_stop=False)
            except HpctrainError as error:
                say(f"not started again here: {error}")
                return verdict

    def begin(self, facts: Attempt, forget_stop: bool) -> None:
        """Begins an attempt in the run folder. Raises HpctrainError."""
        with self.lock.kept():
            self.number = Attempts(self.run_dir).begin(facts, self.run_yaml, forget_stop)
        self.first = self.first or self.number

    def attempt(self) -> RunVerdict:
        """Starts the ranks, waits for their end, and records the verdict."""
        words: list[LastWord] = []
        with self.lock.kept():
            launch = prepare(self.make_launch, self.number)
            verdict = self.replacement() or launch  # preparing may have taken long
        if isinstance(verdict, Launch):
            verdict, words = WatchedAttempt(
                verdict,
                self.run_dir,
                self.number,
                self.lock,
                self.signals,
                self.limits,
                self.verbose,
                self.by_person,
                self.first,
            ).run()
        with self.lock.kept():
            verdict = self.replacement() or verdict
            record(self.run_dir, self.number, verdict, words)
        return verdict

    def following(self, verdict: RunVerdict) -> Attempt | RunVerdict:
        """Returns the facts of the attempt after the one with this verdict; if none follows, the run's verdict."""
        with self.lock.kept():
            asked = bool(self.signals.received) or requested_stop(self.run_dir) is not None
            saved, self.step = self.step, newest_step(self.run_dir, self.step)
            self.idle = self.idle + 1 if self.step == saved else 0
            if self.again is None or self.idle >= self.limits.max_failures or not starts_again(verdict, asked):
                return verdict
            try:
                found = self.again(verdict)
            except (HpctrainError, OSError) as error:
                say(f"not started again here: {error}")
                return verdict
            return verdict if found is None else self.replacement() or found

    def replacement(self) -> RunVerdict | None:
        """Returns the verdict if another attempt has replaced this one; None if it still holds its run folder."""
        try:
            self.lock.check()
            Attempts(self.run_dir).check_fence(self.number)
        except Replaced as error:
            return replaced(error)
        except OSError as error:  # being unable to check does not end the run
            say(f"cannot check whether a newer attempt has begun: {error}", SHOWN_S)
        return None


def newest_step(run_dir: RunDir, known: int | None) -> int | None:
    """Returns the step of the newest checkpoint, or ``known`` if the folder cannot be read (counts as no progress)."""
    try:
        return retry_or_fail(run_dir.newest_checkpoint_step)
    except HpctrainError as error:
        say(str(error))
        return known


def prepare(make_launch: Callable[[int], Launch], number: int) -> Launch | RunVerdict:
    """Returns what to start, or the verdict if the attempt cannot start."""
    try:
        return make_launch(number)
    except Stopped as error:
        return RunVerdict(Action.STOP, error.exit_code, error.what, error.fix, code=error.code)
    except HpctrainError as error:
        code = code_of(error)
        code = Code.PREFLIGHT if code in GENERAL else code
        again = code is Code.NODE and error.exit_code is ExitCode.FAILURE
        action = Action.REQUEUE if again else Action.FAIL
        return RunVerdict(action, error.exit_code, error.what, error.fix, code=code, before_ranks=True)


def record(run_dir: RunDir, number: int, verdict: RunVerdict, words: Sequence[LastWord]) -> None:
    """Writes the verdict and last words into the run folder. On a full disk the exit code still gives the verdict."""
    try:
        Attempts(run_dir).end(number, verdict, words)
    except (HpctrainError, OSError) as error:
        if verdict.exit_code in (ExitCode.DONE, ExitCode.STOPPED):  # after a failure the user needs only the verdict
            say(str(error))


def report(verdict: RunVerdict, run_dir: RunDir, command: Sequence[str] = (), saves: bool = True) -> bool:
    """Prints how the run ended and what to do next, unless it is done; False if the message could not be written.

    ``command`` resumes the run; ``saves`` says whether hpctrain knows the run's checkpoints, even if it finds none.
    """
    if verdict.action is Action.DONE:
        return True
    logs = "" if verdict.exit_code in (ExitCode.STOPPED, ExitCode.USER_ERROR) else f"\n  logs: {run_dir.logs}"
    resume = ""
    if command and verdict.exit_code is not ExitCode.USER_ERROR:
        step = newest_step(run_dir, None)
        where = f" {begins(run_dir, step)}" if saves or step is not None else ""
        resume = f"\n  resume{where}: {shlex.join(command)}"
    needs_fix = verdict.fix and not (resume and verdict.exit_code is ExitCode.STOPPED)
    fix = f"\n  fix: {verdict.fix}" if needs_fix else ""
    return say(f"{verdict.reason}{fix}{logs}{resume}")


def begins(run_dir: RunDir, step: int | None) -> str:
    """Says where the next attempt begins: at the checkpoint of ``step``, or at a newer snapshot on the nodes."""
    where = "from the beginning" if step is None else f"from step {step}"
    with suppress(HpctrainError, OSError):
        trained = Attempts(run_dir).info().get("trained") or 0
        progress = RunView(run_dir.path).snapshot().progress
        kept = [progress.newest(SnapshotSaved), progress.newest(Resumed)]  # an attempt keeps what it resumed from
        steps = [each.step for each in kept if each and each.attempt >= trained and each.tier not in (None, "store")]
        if max(steps, default=0) > (step or 0):
            return f"from step {max(steps)} if its snapshot is complete, else {where}"
    return where


def say_continues(hosts: Sequence[str], ranks: int | None) -> None:
    """Says on which hosts the next attempt runs."""
    say(f"continuing on {', '.join(hosts)} with {ranks} rank{'s' if ranks != 1 else ''}", SHOWN_S)


def choose(hosts: Sequence[str], out: Collection[str], config: Config) -> list[str] | None:
    """Chooses the nodes for the next attempt: the first usable ones, or None if too few are left. Pure.

    Args:
        hosts: hosts of the allocation.
        out: hosts that are lost or excluded.
        config: gives the number of nodes wanted, and the minimum.
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
    """Whether the run can continue on this number of ranks: its plan divides it, and the global batch is unchanged."""
    batch_stays = bool(config.launch.command) or config.train.batch_per_rank is None
    return batch_stays and ranks % (config.parallel.tensor * config.parallel.pipeline) == 0

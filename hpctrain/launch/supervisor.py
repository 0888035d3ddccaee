"""The process that starts ranks and outlives them. No MPI, no framework; it works for any launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain import events
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.launch import launchers, processes
from hpctrain.launch.last_words import GOOD_ENDINGS, Ending, LastWord, collect, merge, pieces
from hpctrain.launch.live_lock import LiveLock, myself
from hpctrain.launch.passing import Passing
from hpctrain.launch.signals import StopSignals
from hpctrain.launch.verdict import Action, Stop, Verdict, decide
from hpctrain.run_dir import ATTEMPT, RUN_DIR, RunDir

TICK_S = 0.05
"""Seconds between two looks at everything."""
WORDS_EVERY_S = 1.0
"""Seconds between two readings of the ranks' words: they may lie on a shared file system."""
FAILURE_GRACE_S = 10.0
"""Seconds that a launcher has to take the others down after one rank has failed or died."""
END_GRACE_S = 60.0
"""Seconds that the other ranks have to end after the first one has ended well."""
KILL_GRACE_S = 5.0
"""Seconds between asking a launcher to end and killing it."""

PERSON_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that a person at a terminal sends; the others come from schedulers."""


@dataclass(frozen=True)
class Launch:
    """What is started in one attempt."""

    argv: Sequence[str]
    """The launcher, its options, and the ranks' command."""
    env: Mapping[str, str]
    """Variables set for the launcher and the ranks, on top of this process's own."""
    ranks: int
    """Expected number."""
    saves: bool = True
    """Whether the ranks save checkpoints; of a plain command nobody knows."""


@dataclass(frozen=True)
class Limits:
    """How long things may take, and how often they may fail."""

    stop_grace_s: float = 60.0
    """From a stop request to the end of the ranks."""
    max_failures: int = 3
    """Failed attempts in a row without a new checkpoint."""


@dataclass
class Attempt:
    """One attempt as the supervisor sees it; ``run`` is all there is to call."""

    launch: Launch
    run_dir: RunDir
    number: int
    lock: LiveLock
    signals: StopSignals
    limits: Limits
    verbose: bool = False
    by_person: Callable[[int], bool] = lambda number: number in PERSON_SIGNALS
    process: subprocess.Popen[bytes] | None = None
    passing: Passing | None = None
    failure: Verdict | None = None
    """Set when the supervisor itself ends the attempt."""
    stop: Stop | None = None
    stop_deadline: float = float("inf")
    kill_at: float = float("inf")
    suspicion: dict[str, float] = field(default_factory=dict)
    """Since when something is seen that may not last."""
    next_look: float = 0.0
    shown_bytes: int = 0

    def run(self) -> tuple[Verdict, list[LastWord]]:
        """Starts the ranks, watches until all are gone, and decides."""
        self.watch()
        text = self.launcher_text() + (self.passing.text if self.passing is not None else "")
        words = self.last_words(text)
        attempts = [*self.run_dir.attempts()]
        if attempts:
            attempts[-1] = {**attempts[-1], "to_step": self.run_dir.newest_checkpoint_step()}
        failure = self.hang() or self.failure or self.launch_failure(words, text)
        return decide(words, attempts, self.limits.max_failures, self.stop, failure, self.launch.saves), words

    def watch(self) -> None:
        """Runs the launcher to its end. Its exit code says little: launchers lose those of ranks."""
        log = self.open_log()
        environment = {**os.environ, **self.launch.env, ATTEMPT: str(self.number), RUN_DIR: str(self.run_dir.path)}
        processes.adopt_orphans()
        with log:
            self.process = subprocess.Popen(
                list(self.launch.argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
                # mpirun and srun end their ranks on SIGTERM. There is one thread here, so a preexec_fn is safe.
                preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )
        assert self.process.stdout is not None
        self.passing = Passing(self.process.stdout, sys.stdout.fileno())
        try:
            while self.process.poll() is None:
                self.tick(time.monotonic())
                time.sleep(TICK_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            processes.end_descendants(KILL_GRACE_S)
            self.passing.pump()
            self.process.stdout.close()
            self.show_launcher_text()

    def tick(self, now: float) -> None:
        """One look at signals, the STOP file, the ranks and the clock."""
        self.lock.beat()
        if self.passing is not None:
            self.passing.pump()
        self.take_signals(now)
        if now >= self.next_look:
            self.next_look = now + WORDS_EVERY_S
            self.take_stop_file(now)
            self.look_at_ranks(now)
            self.show_launcher_text()
        if now >= self.stop_deadline:
            grace = f"{self.limits.stop_grace_s:.0f} s"
            self.end(now, f"the ranks did not stop within {grace} of the request", "raise launch.stop_grace_s", "stop")
            self.stop_deadline = float("inf")
        if now >= self.kill_at:
            self.kill_at = float("inf")
            self.kill()

    def take_signals(self, now: float) -> None:
        """The first signal asks the ranks to stop; a second Ctrl-C ends them."""
        received = self.signals.received
        if received and self.stop is None:
            by = f"signal {signal.Signals(received[0]).name}"
            with contextlib.suppress(OSError):
                self.run_dir.request_stop(by)
            self.begin_stop(now, Stop(by, self.by_person(received[0])))
        if len(received) > 1 and received[-1] in PERSON_SIGNALS and self.failure is None:
            self.end(now, "ended at once by a second Ctrl-C", "the same command resumes it", "stop")

    def take_stop_file(self, now: float) -> None:
        """A person, or hpctrain stop, has made the STOP file."""
        if self.stop is None and (by := self.run_dir.stop_requested_by()) is not None:
            self.begin_stop(now, Stop(by, by_person=not by.startswith("signal ") or self.by_person(_number(by))))

    def begin_stop(self, now: float, stop: Stop) -> None:
        """Ranks see the STOP file themselves; from here on the clock runs."""
        self.stop = stop
        self.stop_deadline = now + self.limits.stop_grace_s
        again = "; again to end at once" if stop.by == "signal SIGINT" else ""
        how = "after the current step, with a checkpoint" if self.launch.saves else "the command"
        say(f"{stop.by}: stopping {how}{again}")

    def look_at_ranks(self, now: float) -> None:
        """Ends an attempt that the launcher does not end by itself although a rank has failed, died or left."""
        if self.failure is not None:
            return
        words = collect(self.run_dir, self.number)
        if failed := [word for word in words if word.ending is Ending.FAILED]:
            self.suspect("failed", now, FAILURE_GRACE_S, f"rank {failed[0].rank} failed", words)
        gone = [word for word in words if word.ending is Ending.RUNNING and not self.lives(word)]
        if gone:
            what = f"rank {gone[0].rank} on {gone[0].host} (process {gone[0].pid}) died"
            self.suspect("died", now, FAILURE_GRACE_S, what, words)
        ended = [word for word in words if word.ending in GOOD_ENDINGS]
        if ended and len(ended) < self.launch.ranks:
            late = sorted(set(range(self.launch.ranks)) - {word.rank for word in ended})
            what = f"rank {ended[0].rank} ended {END_GRACE_S:.0f} s ago but ranks {late[:8]} did not"
            self.suspect("left", now, END_GRACE_S, what, words)

    def suspect(self, key: str, now: float, patience_s: float, what: str, words: Sequence[LastWord]) -> None:
        """Ends the attempt once this has lasted too long. A rank's own error stays the reason."""
        if now - self.suspicion.setdefault(key, now) > patience_s:
            own_error = any(word.ending is Ending.FAILED for word in words)
            self.end(now, "" if own_error else what, "see the rank's log", "killed" if key == "died" else "hang")

    def lives(self, word: LastWord) -> bool:
        """Whether a rank's process is there; what runs on another host is not seen from here."""
        return word.host != socket.gethostname() or processes.is_alive(word.pid, word.birth)

    def end(self, now: float, reason: str, fix: str, cause: str) -> None:
        """Has the launcher end all ranks, and kills what remains some seconds later."""
        if reason:
            self.failure = Verdict(Action.REQUEUE, ExitCode.FAILURE, reason, fix, cause=cause)
        if self.process is not None and self.kill_at == float("inf"):
            self.kill_at = now + KILL_GRACE_S
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        """The launcher's whole session; ranks in sessions of their own are tethered to it, or swept up afterwards."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def last_words(self, text: str) -> list[LastWord]:
        """The ranks' words, with what is known of those that left none."""
        words = collect(self.run_dir, self.number)
        deaths = launchers.deaths(text) if self.failure is None else []
        return [complete(word, deaths, words) for word in words]

    def hang(self) -> Verdict | None:
        """Why the monitor ended the ranks, if it did; their deaths are its doing then."""
        try:
            told = events.decode(self.run_dir.monitor_events.read_bytes())
        except OSError:
            return None
        for event in told:
            ended = event["event"] == "hang" and event.get("kind") == "hung" and event.get("action") == "abort"
            if ended and event["attempt"] == self.number:
                culprit = next((rank["rank"] for rank in event["ranks"]), None)
                fix = f"the stacks are in {self.run_dir.monitor}; the same command resumes from the last checkpoint"
                return Verdict(Action.REQUEUE, ExitCode.FAILURE, event["sentence"], fix, culprit, cause="hang")
        return None

    def launch_failure(self, words: Sequence[LastWord], text: str) -> Verdict | None:
        """Why ranks are missing altogether, if they are."""
        if launchers.lost_a_node(text):
            what = f"a node was lost: {last_line(text)}"
            return Verdict(Action.REQUEUE, ExitCode.FAILURE, what, "the same command resumes it", cause="node")
        known = {word.rank for word in words if word.rank is not None}
        if any(word.ending in (Ending.FAILED, Ending.KILLED) for word in words) or len(known) == self.launch.ranks:
            return None
        missing = sorted(set(range(self.launch.ranks)) - known)
        dead = next((death for death in launchers.deaths(text) if death.rank in missing), None)
        told = f"rank {dead.rank} {dead.cause}" if dead else last_line(text)
        what = f"{len(missing)} of {self.launch.ranks} ranks ended before they could say why: {told or 'nobody says'}"
        fix = f"see {self.run_dir.log('launcher', self.number)}"
        return Verdict(Action.REQUEUE, ExitCode.FAILURE, what, fix, dead.rank if dead else None, cause="vanished")

    def open_log(self) -> Any:
        """Where the launcher's own messages go."""
        try:
            return open(self.run_dir.log("launcher", self.number), "wb")
        except OSError:
            return open(os.devnull, "wb")

    def launcher_text(self) -> str:
        """What the launcher said."""
        try:
            return self.run_dir.log("launcher", self.number).read_text(errors="replace")
        except OSError:
            return ""

    def show_launcher_text(self) -> None:
        """With --verbose, what the launcher has said since the last look."""
        if self.verbose:
            text = self.launcher_text()
            sys.stderr.write(text[self.shown_bytes :])
            sys.stderr.flush()
            self.shown_bytes = len(text)


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
        make_launch: what to start, given the attempt's number; called once the folder is ours. Errors it raises end
            the attempt before anything is started.
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
        number = run_dir.begin_attempt(host=socket.gethostname(), job_id=os.environ.get("SLURM_JOB_ID"), **facts)
        if run_yaml is not None:
            run_dir.run_yaml.write_text(run_yaml, encoding="utf-8")
        pieces(run_dir, number).mkdir(exist_ok=True)
        attempt = Attempt(make_launch(number), run_dir, number, lock, signals, limits, verbose)
        attempt.by_person = by_person or attempt.by_person
        verdict, words = attempt.run()
        record(run_dir, number, verdict, words)
        return verdict
    finally:
        lock.release()
        signals.restore()


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


def complete(word: LastWord, deaths: Sequence[launchers.Death], words: Sequence[LastWord]) -> LastWord:
    """Says for a rank that could not how it ended, as far as can be told."""
    if word.ending is not Ending.RUNNING:
        return word
    death = next((d for d in deaths if d.rank == word.rank or (d.rank is None and d.pid == word.pid)), None)
    if death is None:
        failed = any(other.ending is Ending.FAILED for other in words) or bool(deaths)
        return dataclasses.replace(word, ending=Ending.TAKEN_DOWN if failed else Ending.VANISHED)
    local = word.host == socket.gethostname()
    memory = death.out_of_memory or (death.signal == signal.SIGKILL and local and ran_out_of_memory(word))
    cause = launchers.OUT_OF_MEMORY if memory else death.cause
    code = 128 + death.signal if death.signal else death.exit_code
    return dataclasses.replace(word, ending=Ending.KILLED, note=cause, exit_code=code)


def ran_out_of_memory(word: LastWord) -> bool:
    """Whether the kernel's log names the process, or its control group (which is ours) counts one more such kill."""
    if processes.kernel_killed_for_memory(word.pid):
        return True
    now = processes.oom_kills()
    return word.oom_kills is not None and now is not None and now > word.oom_kills


def last_line(text: str) -> str:
    """The last line of a launcher's text that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=\t")]
    return lines[-1][:300] if lines else ""


def say(text: str) -> None:
    """To the person in front of the terminal, or reading the job's output."""
    print(f"hpctrain: {text}", file=sys.stderr, flush=True)


def _number(by: str) -> int:
    with contextlib.suppress(KeyError):
        return int(signal.Signals[by.removeprefix("signal ")])
    return 0

"""One attempt under watch: starts the launcher, passes requests on, sees to it that all ranks end together."""

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

from hpctrain.errors import Code, Replaced, RunFailed
from hpctrain.launch import launcher_messages
from hpctrain.launch.patience import PAUSES_S
from hpctrain.launch.postmortem import all_ended_well, complete, died_first, hang, missing_ranks
from hpctrain.launch.stdout_relay import Passing
from hpctrain.run import step_folder
from hpctrain.run.attempts import Attempts
from hpctrain.run.decision import decide
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord, collect, pieces
from hpctrain.run.live_lock import LiveLock
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.stop_request import StopRequest, request_stop, requested_stop
from hpctrain.run.verdict import Stop, Verdict, failed_with, replaced
from hpctrain.run.word_reader import WordReader
from hpctrain.system import processes
from hpctrain.system.files import open_log
from hpctrain.system.output import say, tell
from hpctrain.system.signals import StopSignals

TICK_S = 0.05
"""Seconds between two looks at everything."""
WORDS_EVERY_S = 1.0
"""Seconds between two readings of the ranks' words: they may lie on a shared file system."""
LOOKING = 0.05
"""Largest share of the time that goes into reading them."""
FAILURE_GRACE_S = 10.0
"""Seconds that a launcher has to take the others down after one rank has failed or died."""
END_GRACE_S = 60.0
"""Seconds that the other ranks have to end after the first one has ended well."""
STOPPED_GRACE_S = 1.0
"""Seconds that a launcher has to end once all ranks have stopped on request: a scheduler may take the nodes soon."""
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
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Hosts of ranks, as far as they are known before the start."""
    unheard: Callable[[str], bool] = lambda text: False
    """Whether a launcher that said this started nothing, since the scheduler's controller was away."""


@dataclass(frozen=True)
class Limits:
    """How long things may take, and how often they may fail."""

    stop_grace_s: float = 60.0
    """From a stop request to the end of the ranks, and from each sign that their last checkpoint grows."""
    max_failures: int = 3
    """Failed attempts in a row without a new checkpoint."""


@dataclass
class WatchedAttempt:
    """One attempt as the supervisor sees it; ``run`` is all there is to call."""

    launch: Launch
    run_dir: RunDir
    number: int
    lock: LiveLock
    signals: StopSignals
    limits: Limits
    verbose: bool = False
    by_person: Callable[[int], bool] = lambda number: number in PERSON_SIGNALS
    """Tells signals of people from those of the scheduler."""
    process: subprocess.Popen[bytes] | None = None
    passing: Passing | None = None
    failure: Verdict | None = None
    """Set when the supervisor itself ends the attempt."""
    stop: Stop | None = None
    stop_deadline: float = float("inf")
    saved_bytes: int = 0
    """Of the checkpoint in flight, at the last look after a stop request."""
    kill_at: float = float("inf")
    suspicion: dict[str, float] = field(default_factory=dict)
    """Since when something is seen that may not last."""
    words: WordReader | None = None
    """From the first look on."""
    next_look: float = 0.0
    shown_bytes: int = 0

    def run(self) -> tuple[Verdict, list[LastWord]]:
        """Starts the ranks, watches until all are gone, and decides."""
        environment = {**os.environ, **self.launch.env, ATTEMPT: str(self.number), RUN_DIR: str(self.run_dir.path)}
        with processes.own_session(environment) as session:
            self.watch_until_heard(session)
        text = self.launcher_text()
        banner = self.passing.text if self.passing is not None else ""  # MPICH reports deaths on its standard output
        told = collect(self.run_dir, self.number)
        untold = [word.rank for word in told if word.ended is None and word.rank is not None]
        bereaved = launcher_messages.bereaved(text + banner)
        # By the notes, its victim on another node could be the first: the two nodes' processors are not equally busy.
        first = launcher_messages.left(text, untold) or died_first(self.run_dir, self.number, told, bereaved)
        deaths = launcher_messages.deaths(text + banner, first) if self.failure is None else []
        words = [complete(word, deaths, told) for word in told]
        attempts = [attempt for attempt in Attempts(self.run_dir).all() if attempt.number <= self.number]
        if attempts:
            attempts[-1] = dataclasses.replace(attempts[-1], to_step=self.run_dir.newest_checkpoint_step())
        failure = self.failure
        if not all_ended_well(words, self.launch.ranks):
            log = self.run_dir.log("launcher", self.number)
            missing = missing_ranks(words, self.launch.ranks, text, banner, log, self.launch.hosts)
            failure = hang(self.run_dir, self.number) or failure or missing
        return decide(words, attempts, self.limits.max_failures, self.stop, failure, self.launch.saves), words

    def watch_until_heard(self, environment: Mapping[str, str]) -> None:
        """Runs the launcher, again where the scheduler's controller was away."""
        self.watch(environment)
        for pause_s in PAUSES_S:
            if self.failure or collect(self.run_dir, self.number) or not self.launch.unheard(self.launcher_text()):
                return
            said = " ".join(self.launcher_text().split())[:300]
            say(f"no rank was started ({said}); starting them again in {pause_s:.0f} s")
            if not self.waits(pause_s):
                return
            self.watch(environment)

    def waits(self, pause_s: float) -> bool:
        """Waits while nothing runs; False where the attempt is to end."""
        end = time.monotonic() + pause_s
        while (now := time.monotonic()) < end:
            try:
                self.lock.beat()
            except Replaced as error:
                self.failure = replaced(error)
            self.take_signals(now)
            self.take_stop_file(now)
            if self.failure is not None or self.stop is not None:
                return False
            time.sleep(min(WORDS_EVERY_S, end - now))
        return True

    def watch(self, environment: Mapping[str, str]) -> None:
        """Runs the launcher to its end. Its exit code says little: launchers lose those of ranks."""
        log = self.open_log()
        processes.adopt_orphans()
        with log:
            self.process = subprocess.Popen(
                list(self.launch.argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
                # mpirun and srun end their ranks then. Safe, since there is one thread here.
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
        try:
            self.lock.beat()
        except Replaced as error:
            self.end(now, replaced(error))
        if self.passing is not None:
            self.passing.pump()
        self.take_signals(now)
        if now >= self.next_look:
            self.take_stop_file(now)
            self.look_at_ranks(now)
            self.look_at_save(now)
            self.show_launcher_text()
            spent = time.monotonic() - now  # thousands of small files on a shared file system take their time
            self.next_look = now + max(WORDS_EVERY_S, spent / LOOKING)
        if now >= self.stop_deadline:
            grace = f"{self.limits.stop_grace_s:.0f} s"
            what = f"the ranks did not stop within {grace} of the request, or of their checkpoint's last growth"
            self.end(now, failed_with(Code.STOP, what, "raise launch.stop_grace_s"))
            self.stop_deadline = float("inf")
        if now >= self.kill_at:
            self.kill_at = float("inf")
            self.kill()

    def take_signals(self, now: float) -> None:
        """The first signal asks the ranks to stop; a second Ctrl-C ends them."""
        received = self.signals.received
        if received and self.stop is None:
            request = StopRequest.of_signal(received[0])
            with contextlib.suppress(RunFailed):
                request_stop(self.run_dir, request)
            self.begin_stop(now, request)
        if len(received) > 1 and received[-1] in PERSON_SIGNALS and self.failure is None:
            what = "ended at once by a second Ctrl-C"
            self.end(now, failed_with(Code.STOP, what, "the same command resumes it"))

    def take_stop_file(self, now: float) -> None:
        """A person, or hpctrain stop, has made the STOP file."""
        if self.stop is None and (request := requested_stop(self.run_dir)) is not None:
            self.begin_stop(now, request)

    def begin_stop(self, now: float, request: StopRequest) -> None:
        """Ranks see the STOP file themselves; from here on the clock runs."""
        by_person = request.signal is None or self.by_person(request.signal)
        self.stop = Stop(request.by, by_person, request.code)
        self.stop_deadline = now + self.limits.stop_grace_s
        again = "; again to end at once" if request.signal is signal.SIGINT else ""
        how = "after the current step, with a checkpoint" if self.launch.saves else "the command"
        say(f"{request.by}: stopping {how}{again}")

    def look_at_ranks(self, now: float) -> None:
        """Ends an attempt that the launcher does not end by itself although a rank has failed, died or left."""
        if self.failure is not None:
            return
        if self.words is None:
            self.words = WordReader(pieces(self.run_dir, self.number))
        words = self.words.look()
        if failed := [word for word in words if word.ending is Ending.FAILED]:
            self.suspect("failed", now, FAILURE_GRACE_S, f"rank {failed[0].rank} failed", words)
        gone = [word for word in words if word.ending is Ending.RUNNING and not self.lives(word)]
        if gone:
            what = f"rank {gone[0].rank} on {gone[0].host} (process {gone[0].pid}) died"
            self.suspect("died", now, FAILURE_GRACE_S, what, words)
        ended = [word for word in words if word.ending in GOOD_ENDINGS]
        # Ours end together; a program that is not ours may have one rank write for long after the others.
        if self.launch.saves and ended and len(ended) < self.launch.ranks:
            late = sorted(set(range(self.launch.ranks)) - {word.rank for word in ended})
            what = f"rank {ended[0].rank} ended {END_GRACE_S:.0f} s ago but ranks {late[:8]} did not"
            self.suspect("left", now, END_GRACE_S, what, words)
        if len(ended) == self.launch.ranks:
            self.end_launcher(now, STOPPED_GRACE_S if self.stop is not None else END_GRACE_S)

    def look_at_save(self, now: float) -> None:
        """After a stop request: as long as the ranks' checkpoint grows, they have their whole grace before them."""
        if self.stop is None or self.stop_deadline == float("inf"):
            return
        saved_bytes = step_folder.bytes_in_flight(self.run_dir.checkpoints)
        if saved_bytes > self.saved_bytes:
            self.stop_deadline = max(self.stop_deadline, now + self.limits.stop_grace_s)
        self.saved_bytes = saved_bytes

    def suspect(self, key: str, now: float, patience_s: float, what: str, words: Sequence[LastWord]) -> None:
        """Ends the attempt once this has lasted too long. A rank's own error stays the reason.

        A launcher that is ending the ranks itself has the time that it names for it: then it knows which node is gone.
        """
        lasted_s = now - self.suspicion.setdefault(key, now)
        if lasted_s > patience_s and lasted_s > patience_s + launcher_messages.waits_s(self.launcher_text()):
            own_error = any(word.ending is Ending.FAILED for word in words)
            code = Code.KILLED if key == "died" else Code.HANG
            self.end(now, None if own_error else failed_with(code, what, "see the rank's log"))

    def end_launcher(self, now: float, patience_s: float) -> None:
        """Does not wait for ever for what comes after the last words: MPI's end, and that of Slurm's step."""
        if now - self.suspicion.setdefault("over", now) > patience_s:
            self.kill_at = min(self.kill_at, now)

    def lives(self, word: LastWord) -> bool:
        """Whether a rank's process is there; what runs on another host or in a container is not seen from here."""
        here = word.host == socket.gethostname() and word.machine == processes.machine()
        return not here or processes.is_alive(word.pid, word.birth)

    def end(self, now: float, failure: Verdict | None) -> None:
        """Has the launcher end all ranks, and kills what remains some seconds later. ``failure`` is the reason."""
        self.failure = failure or self.failure
        if self.process is not None and self.kill_at == float("inf"):
            self.kill_at = now + KILL_GRACE_S
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        """The launcher's whole session; ranks in sessions of their own are tethered to it, or swept up afterwards."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def open_log(self) -> Any:
        """Where the launcher's own messages go."""
        try:
            return os.fdopen(open_log(self.run_dir.log("launcher", self.number), self.run_dir.path, fresh=True), "wb")
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
            tell(text[self.shown_bytes :], end="")
            self.shown_bytes = len(text)

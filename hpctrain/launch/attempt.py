"""Watches one attempt: forwards stop requests, makes all ranks end together, and finds out why they ended."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hpctrain.errors import Code, HpctrainError, Replaced, RunFailed, code_of
from hpctrain.launch import launcher_messages, postmortem
from hpctrain.launch.launcher_process import KILL_GRACE_S, LauncherProcess
from hpctrain.launch.outage_retry import PAUSES_S
from hpctrain.run import last_words
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.decision import decide
from hpctrain.run.events import CUT_OFF, Hang, decode
from hpctrain.run.first_cause import Death, Fact, Found, Standing
from hpctrain.run.folder import RunDir, bytes_in_flight
from hpctrain.run.last_words import GOOD_ENDINGS, Ending, LastWord, WordReader, collect, pieces
from hpctrain.run.live_lock import LiveLock
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.stop_request import StopRequest, request_stop, requested_stop
from hpctrain.run.tail import Tail
from hpctrain.run.verdict import RunVerdict, Stop, failed_with, replaced
from hpctrain.system import processes
from hpctrain.system.output import SHOWN_S, say
from hpctrain.system.retry import retry_or_fail
from hpctrain.system.signals import StopSignals, signal_name

WORDS_EVERY_S = 1.0
"""Seconds between two reads of the ranks' last words, which may be on a shared file system."""
LOOKING = 0.05
"""Maximum fraction of time spent reading them."""
FAILURE_GRACE_S = 10.0
"""Seconds a launcher gets to end the other ranks after one failed or died."""
END_GRACE_S = 60.0
"""Seconds the other ranks get to end after the first one completed."""
STOPPED_GRACE_S = 1.0
"""Seconds a launcher gets to end after all ranks stopped on request: a scheduler may take the nodes soon."""
AFTER_STOP_S = 10.0
"""Seconds before a job's end that are kept for ending ranks and requeueing."""

START_S = 600.0
"""Seconds from the launcher's start within which all ranks must start."""
JOIN_S = 120.0
"""Seconds within which MPI must then connect them; another second for each 100 ranks."""
NOT_CONNECTED = (
    "their logs have their stacks; if it happens again, choose MPI's network interface "
    "(OMPI_MCA_btl_tcp_if_include, UCX_NET_DEVICES), or another launch.launcher"
)
NODE_SILENCE_S = 0.5
"""Seconds that one node may stay silent, after all others have reported, before it is probed."""

SEE_LOGS = "see the ranks' logs"
PERSON_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals from a person at a terminal; others come from schedulers."""


@dataclass(frozen=True)
class Launch:
    """What to start in one attempt, and how to judge what the launcher does."""

    argv: Sequence[str]
    """The launcher, its options, and the ranks' command."""
    env: Mapping[str, str]
    """Variables set for the launcher and the ranks, on top of this process's own."""
    ranks: int
    """Number of ranks expected."""
    saves: bool = True
    """Whether the ranks write hpctrain checkpoints; what a plain command saves is unknown."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Host by rank, if known before the start."""
    unheard: Callable[[str], bool] = lambda text: False
    """Whether a launcher with this output started nothing because the scheduler's controller was down."""
    unreached: Callable[[Collection[str]], Collection[str]] = lambda hosts: ()
    """Probes hosts that the launcher no longer hears from; returns the unreachable ones. Takes seconds at most."""
    away: Callable[[], Collection[str]] = tuple
    """Returns the hosts known to be lost."""
    parent: int = 0
    """Process ID of the parent that forks the ranks and outlives them; 0 if there is none."""
    can_lose: Callable[[str], bool] = lambda host: False
    """Whether to continue without a host that the monitor cannot reach; if not, the attempt waits for it."""


@dataclass(frozen=True)
class Limits:
    """Limits on stopping and on failed attempts."""

    stop_grace_s: float = 60.0
    """Seconds the ranks get to end after a stop request, renewed whenever their last checkpoint grows."""
    max_failures: int = 3
    """Consecutive failed attempts without a new checkpoint after which the run ends; 0: the first failure ends it."""
    left_s: Callable[[], float] = lambda: math.inf
    """Returns the seconds until the scheduler ends the job."""
    due: Callable[[Sequence[int]], int] = lambda received: next(iter(received), 0)
    """Returns the stop signal to obey, given those received; 0 if there is none."""
    jobs: Collection[str] = ()
    """The job and those that it continues: failures of their attempts count too."""


@dataclass
class WatchedAttempt:
    """One attempt as the supervisor sees it; callers use ``run`` only."""

    launch: Launch
    run_dir: RunDir
    number: int
    lock: LiveLock
    signals: StopSignals
    limits: Limits
    verbose: bool = False
    by_person: Callable[[int], bool] = lambda number: number in PERSON_SIGNALS
    """Whether a signal number comes from a person rather than the scheduler."""
    first: int = 0
    """Number of this command's first attempt."""
    failure: RunVerdict | None = None
    """Set when the supervisor itself ends the attempt."""
    standing: Standing = Standing.ENDED
    """How well ``failure`` explains the attempt's end."""
    ended_at: float = math.inf
    """Unix seconds at which the supervisor ended it; infinity if it did not."""
    gone: frozenset[int | None] = frozenset()
    """Ranks found dead at the last look before the supervisor ended the attempt."""
    stop: Stop | None = None
    unwritten: StopRequest | None = None
    """A request of which the ranks do not know, since its file could not be written yet."""
    stop_deadline: float = math.inf
    saved_bytes: int = 0
    """Size of the unfinished checkpoint when last checked after a stop request."""
    kill_at: float = math.inf
    suspicion: dict[str, float] = field(default_factory=dict)
    """When each condition that may be transient was first seen."""
    next_look: float = 0.0

    @cached_property
    def launcher(self) -> LauncherProcess:
        """The launcher; started by ``run``."""
        return LauncherProcess(self.launch.argv, self.run_dir, self.number, self.launch.parent, self.verbose)

    @cached_property
    def words(self) -> WordReader:
        """Reads the ranks' last words."""
        return WordReader(pieces(self.run_dir, self.number))

    @cached_property
    def monitor(self) -> Tail:
        """Follows the monitor's events of this attempt: those of a long run are many."""
        path = self.run_dir.monitor_events
        with contextlib.suppress(OSError):
            return Tail(path, path.stat().st_size)
        return Tail(path)

    def run(self) -> tuple[RunVerdict, list[LastWord]]:
        """Starts the ranks and watches them until all have ended; returns the verdict and the ranks' last words."""
        environment = {**os.environ, **self.launch.env, ATTEMPT: str(self.number), RUN_DIR: str(self.run_dir.path)}
        with processes.own_session(environment) as session:
            try:
                self.watch(session)
            except OSError as error:  # no more processes or memory, or a file server that fails
                what = f"{Path(self.launch.argv[0]).name} could not be run: {error.strerror or error}"
                self.failure = failed_with(code_of(error), what, "see ulimit -a, and whether its file systems answer")
        self.take_stop_file(time.monotonic())  # ranks that saw it may have ended before the next look
        try:
            written = retry_or_fail(lambda: collect(self.run_dir, self.number))
        except RunFailed as error:
            say(f"how the ranks ended is known from the last look only: {error.what}")
            written = self.words.look()
        words, failure = written, self.failure
        if self.stop is not None and all(word.is_starting for word in written):
            words = []  # it was stopped before any rank began
        elif not postmortem.all_ended_well(written, self.launch.ranks):
            words, failure = self.concluded(written)
        attempts, before = self.earlier()
        return decide(words, attempts, self.limits.max_failures, self.stop, failure, self.launch.saves, before), words

    def earlier(self) -> tuple[list[Attempt], Sequence[LastWord]]:
        """Returns the attempts that count, up to this one, and the last words of the one before it."""
        try:
            attempts = retry_or_fail(self.attempts_so_far)
            if any(attempt.number == self.number - 1 for attempt in attempts):
                before = retry_or_fail(lambda: last_words.read(self.run_dir, self.number - 1))
                return attempts, before.ranks if before else ()
            return attempts, ()
        except RunFailed as error:
            say(f"the verdict does not count earlier attempts: {error.what}")
            return [], ()

    def concluded(self, written: Sequence[LastWord]) -> tuple[list[LastWord], RunVerdict | None]:
        """Returns the last words, completed for ranks that left none, and a verdict unless a rank's error gives it."""
        text, banner = self.launcher.messages, self.launcher.banner
        cause = postmortem.settled(lambda: self.facts(written, text, banner))
        words, log = postmortem.with_endings(written, cause), self.run_dir.log("launcher", self.number)
        if isinstance(cause, Found):
            return words, cause.verdict
        if isinstance(cause, LastWord):
            return words, None
        return words, postmortem.missing_ranks(words, self.launch.ranks, text or banner, log, cause)

    def facts(self, written: Sequence[LastWord], text: str, banner: str) -> list[Fact]:
        """Returns what is known about this attempt's end, without deaths that the supervisor may have caused."""
        found = postmortem.facts_of(self.run_dir, self.number, written, text, banner)
        if (node := postmortem.lost_node(written, text, banner, self.launch.hosts)) is not None:
            found.append(Found(Standing.NODE, node))
        reported = any(death.standing is not Standing.VICTIM for death in launcher_messages.deaths(text + banner))
        if self.launcher.signal and self.ended_at == math.inf and not reported:
            found.append(Found(Standing.LAUNCHER, self.launcher_death(written)))
        if self.failure is not None:
            found.append(Found(self.standing, self.failure))

        def ours(death: Death) -> bool:
            if death.at is not None:
                return death.at >= self.ended_at
            return self.standing is Standing.SEEN and death.rank not in self.gone

        return [each for each in found if not isinstance(each, Death) or not ours(each)]

    def launcher_death(self, words: Sequence[LastWord]) -> RunVerdict:
        """Returns the verdict on a killed launcher; ranks that still ran died with it, without a last word."""
        how = f"was killed by {signal_name(self.launcher.signal)}"
        process = self.launcher.process
        mine = (word for word in words if process and (word.pid, word.host) == (process.pid, socket.gethostname()))
        if alone := next(mine, None):  # without a launcher
            what = f"rank {alone.rank} on {alone.host} {how}"
            return failed_with(Code.KILLED, what, SEE_LOGS, alone.rank, alone.host)
        name, ranks = Path(self.launch.argv[0]).name, self.launch.ranks
        fell = ranks - sum(word.ending in GOOD_ENDINGS for word in words)
        which = "all" if fell == ranks else f"{fell} of {ranks}"
        return failed_with(Code.KILLED, f"{name} {how}, and {which} ranks with it", SEE_LOGS)

    def counts(self, attempt: Attempt) -> bool:
        """Whether an attempt, up to this one, is of the same command or job: failures of others use up no tries."""
        is_ours = attempt.number >= self.first or not {attempt.job, attempt.job_id}.isdisjoint(self.limits.jobs)
        return is_ours and attempt.number <= self.number

    def attempts_so_far(self) -> list[Attempt]:
        """Returns the attempts up to and including this one, which has just ended. Raises OSError."""
        attempts = [attempt for attempt in Attempts(self.run_dir).all() if self.counts(attempt)]
        newest = self.run_dir.newest_checkpoint_step()
        if attempts:
            attempts[-1] = dataclasses.replace(attempts[-1], to_step=newest)
        return attempts

    def watch(self, environment: Mapping[str, str]) -> None:
        """Runs the launcher; runs it again if it started nothing because the scheduler's controller was down."""
        self.launcher.run(environment, self.tick)
        for pause_s in PAUSES_S:
            said = self.launcher.messages
            if self.failure or not self.launch.unheard(said) or self.words.look():
                return
            what = f"no rank was started ({' '.join(said.split())[:300]}); starting them again in {pause_s:.0f} s"
            say(what, SHOWN_S)
            if not self.waits(pause_s):
                return
            self.suspicion.clear()
            self.launcher.run(environment, self.tick)

    def waits(self, pause_s: float) -> bool:
        """Waits between two starts; False if the attempt must end (stop request, or lock lost)."""
        end = time.monotonic() + pause_s
        while (now := time.monotonic()) < end:
            self.listen(now)
            self.take_stop_file(now)
            if self.failure is not None or self.stop is not None:
                return False
            time.sleep(min(WORDS_EVERY_S, end - now))
        return True

    def listen(self, now: float) -> None:
        """Gives a sign of life, and handles signals."""
        try:
            self.lock.beat()
        except Replaced as error:
            self.end(now, replaced(error))
        self.take_signals(now)

    def tick(self, now: float) -> None:
        """Checks signals, the STOP file, the ranks and the clock."""
        self.launcher.forward_output()
        self.listen(now)
        if now >= self.next_look:
            self.take_stop_file(now)
            self.look_at_ranks(now)
            self.look_at_save(now)
            self.launcher.show_messages()
            spent = time.monotonic() - now  # thousands of small files on a shared file system are slow to read
            self.next_look = now + max(WORDS_EVERY_S, spent / LOOKING)
        if now >= self.stop_deadline and self.ended_at == math.inf:
            self.look_at_save(now)  # the last look may be minutes ago
        if now >= self.stop_deadline and self.ended_at == math.inf:
            grace = f"{self.limits.stop_grace_s:.0f} s"
            what = f"the ranks did not stop within {grace} of the request or of saving more, or before the time limit"
            fix = "raise launch.stop_grace_s; before a time limit, launch.slurm.signal_s"
            self.end(now, failed_with(Code.STOP, what, fix))
        if now >= self.kill_at:
            self.kill_at = math.inf
            self.ended_at = min(self.ended_at, time.time())
            self.launcher.kill()

    def take_signals(self, now: float) -> None:
        """Handles signals: the first asks the ranks to stop, a later Ctrl-C ends them at once.

        A later SIGHUP does not, because a closing terminal sends it twice.
        """
        received = self.signals.received
        if self.stop is None and (number := self.limits.due(received)):
            self.unwritten = StopRequest.of_signal(number)
            self.begin_stop(now, self.unwritten)
        if self.unwritten is not None:
            with contextlib.suppress(RunFailed):
                request_stop(self.run_dir, self.unwritten)
                self.unwritten = None
        if signal.SIGINT in received[1:] and self.failure is None:
            what = "ended at once by a second Ctrl-C"
            self.end(now, failed_with(Code.STOP, what, "the same command resumes it"))

    def take_stop_file(self, now: float) -> None:
        """Handles a STOP file, made by a person or by ``hpctrain stop``."""
        if self.stop is None and (request := requested_stop(self.run_dir)) is not None:
            self.begin_stop(now, request)

    def begin_stop(self, now: float, request: StopRequest) -> None:
        """Starts the grace period. The ranks notice the STOP file themselves."""
        by_person = request.signal is None or self.by_person(request.signal)
        self.stop = Stop(request.by, by_person, request.code)
        self.stop_deadline = now + self.grace_s()
        again = "; again to end at once" if request.signal is signal.SIGINT else ""
        how = "after the current step, with a checkpoint" if self.launch.saves else "the command, which must save"
        say(f"{request.by}: stopping {how}{again}", SHOWN_S)

    def grace_s(self) -> float:
        """Returns the seconds that ranks get to stop, from now on; what follows needs time before the job ends too."""
        left_s = self.limits.left_s()
        return min(self.limits.stop_grace_s, left_s - min(AFTER_STOP_S, left_s / 4))

    def look_at_ranks(self, now: float) -> None:
        """Ends the attempt if a rank failed, died or finished, but the launcher keeps running."""
        if self.failure is not None:
            return
        words = self.words.look()
        if self.stop is not None and all(word.is_starting for word in words):  # others see the request themselves
            self.suspect("unborn", now, FAILURE_GRACE_S, None)
        self.look_at_start(now, words)
        self.look_at_nodes(now, words)
        gone = [word for word in words if word.ending is Ending.RUNNING and not self.lives(word)]
        if self.ended_at == math.inf:
            self.gone = frozenset(word.rank for word in gone)
        if gone:
            what = f"rank {gone[0].rank} on {gone[0].host} (process {gone[0].pid}) died"
            self.suspect("died", now, FAILURE_GRACE_S, failed_with(Code.KILLED, what, SEE_LOGS))
        if any(word.ending is Ending.FAILED for word in words):
            self.suspect("failed", now, FAILURE_GRACE_S, None)
        ended = [word for word in words if word.ending in GOOD_ENDINGS]
        # hpctrain's ranks end together; in a plain command one rank may keep writing long after the others.
        if self.launch.saves and ended and len(ended) < self.launch.ranks:
            late = sorted(set(range(self.launch.ranks)) - {word.rank for word in ended})
            what = f"rank {ended[0].rank} ended {END_GRACE_S:.0f} s ago but ranks {late[:8]} did not"
            self.suspect("left", now, END_GRACE_S, failed_with(Code.HANG, what, SEE_LOGS))
        # MPI and Slurm's step may need long to end after all ranks have left their last word.
        grace_s = END_GRACE_S if self.stop is None else STOPPED_GRACE_S
        if len(ended) == self.launch.ranks and self.lasted_s("over", now) > grace_s:
            self.kill_at = min(self.kill_at, now)

    def look_at_start(self, now: float, words: Sequence[LastWord]) -> None:
        """Ends an attempt whose ranks do not start, or that MPI does not connect: neither need ever end by itself."""
        ranks = self.launch.ranks
        absent = sorted(set(range(ranks)) - {word.rank for word in words})[: max(0, ranks - len(words))]
        if absent:
            what = f"ranks {absent[:8]} of {ranks} did not start within {START_S:.0f} s"
            self.suspect("absent", now, START_S, failed_with(Code.HANG, what, SEE_LOGS))
        elif starting := [word.rank for word in words if word.is_starting]:
            join_s = JOIN_S + ranks / 100
            what = f"all {ranks} ranks started, but MPI did not connect ranks {starting[:8]} within {join_s:.0f} s"
            self.suspect("apart", now, join_s, failed_with(Code.HANG, what, NOT_CONNECTED))

    def look_at_nodes(self, now: float, words: Sequence[LastWord]) -> None:
        """Ends an attempt whose launcher waits for a lost node; srun takes half a minute to report the loss."""
        hosts = postmortem.unreported(words)
        away, cut_off = self.launch.away(), self.cut_off()
        if gone := next((host for host in hosts.values() if host in away or host in cut_off), None):
            ranks = [rank for rank, other in hosts.items() if other == gone]
            self.end(now, postmortem.host_lost(ranks, gone, by_slurm=False))
            if gone in cut_off:
                self.kill_at = now  # mpirun would wait for that host
            return
        silent = launcher_messages.silent_hosts(self.launcher.messages, hosts)
        if not silent or self.lasted_s(f"silent {sorted(silent)}", now) < NODE_SILENCE_S:
            return
        if unreached := self.launch.unreached(silent):
            ranks = [rank for rank, other in hosts.items() if other in unreached]
            self.end(now, postmortem.host_lost(ranks, min(unreached)))
            self.kill_at = now

    def cut_off(self) -> set[str | None]:
        """Returns hosts that the monitor newly reports as unreachable and that the run can do without."""
        try:
            events = decode(self.monitor.lines())
        except HpctrainError:
            return set()
        hangs = [event for event in events if isinstance(event, Hang) and event.attempt == self.number]
        hosts = {rank.host for event in hangs if event.kind == CUT_OFF for rank in event.ranks}
        return {host for host in hosts if host and self.launch.can_lose(host)}

    def look_at_save(self, now: float) -> None:
        """After a stop request, renews the grace period if the ranks' checkpoint has grown."""
        if self.stop is None:
            return
        saved_bytes = bytes_in_flight(self.run_dir.checkpoints)
        if saved_bytes > self.saved_bytes:
            self.stop_deadline = max(self.stop_deadline, now + self.grace_s())
        self.saved_bytes = saved_bytes

    def suspect(self, key: str, now: float, grace_s: float, failure: RunVerdict | None) -> None:
        """Ends the attempt if the condition ``key`` lasts; ``failure`` is the reason unless a better one is found.

        A launcher that is ending the ranks gets the time it announces; after that it reports which node is lost.
        """
        lasted_s = self.lasted_s(key, now)
        if self.ended_at == math.inf and lasted_s > grace_s + launcher_messages.waits_s(self.launcher.messages):
            self.end(now, failure, Standing.SEEN)

    def lasted_s(self, key: str, now: float) -> float:
        """Returns for how long the condition ``key`` has been seen."""
        return now - self.suspicion.setdefault(key, now)

    def lives(self, word: LastWord) -> bool:
        """Whether a rank's process is alive; assumed so on other hosts and in containers, which cannot be checked."""
        here = word.host == socket.gethostname() and word.machine == processes.machine()
        return not here or processes.is_alive(word.pid, word.birth)

    def end(self, now: float, failure: RunVerdict | None, standing: Standing = Standing.ENDED) -> None:
        """Terminates the launcher, which ends all ranks; what remains is killed KILL_GRACE_S later.

        ``failure`` is the reason, if known.
        """
        if failure:
            self.failure, self.standing = failure, standing
        self.ended_at = min(self.ended_at, time.time())
        if self.launcher.process is not None and self.kill_at == math.inf:
            self.kill_at = now + KILL_GRACE_S
            self.launcher.terminate()

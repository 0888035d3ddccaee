"""Handles hung and dead ranks: follows the heartbeats, collects stacks, reports the culprits and ends the attempt."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import RunFailed
from hpctrain.monitor.chief import collectives, sentence
from hpctrain.monitor.chief.finding import NodeCommand, Watched
from hpctrain.monitor.chief.hang import ENDED, GONE, SILENT, STOPPED, Beat, HangFinding, HangWatch
from hpctrain.monitor.connection import UNANSWERED_S
from hpctrain.monitor.framing import Message
from hpctrain.run.events import CUT_OFF, AboutRank
from hpctrain.run.events import Hang as HangEvent
from hpctrain.run.first_cause import LATE_NOTE_S, MPI_ERR_UNKNOWN
from hpctrain.run.last_words import noted_deaths, notes_deaths
from hpctrain.system.files import write_atomically

REMEMBERED = 64
"""Spans kept; older ones no longer matter."""


class Suspensions:
    """Time spans in which the run could not move or was not observed."""

    def __init__(self) -> None:
        self.spans: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        """Begin and end of each span, ordered and disjoint."""

    def add(self, begin: float, end: float) -> None:
        """Adds a span and merges it with those that it touches."""
        while self.spans and begin <= self.spans[-1][1]:
            earlier = self.spans.pop()
            begin, end = min(begin, earlier[0]), max(end, earlier[1])
        self.spans.append((begin, end))

    def running(self, since: float, until: float) -> float:
        """Seconds between two times without the suspended spans."""
        stopped = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self.spans)
        return max(0.0, until - since - stopped)


CHECK_S = 1.0
"""Seconds between checks for a hang, whose cost grows with the ranks; a death is checked at once."""
SILENT_S = 10.0
"""Age of a heartbeat above which its node counts as silent."""
JOIN_S = 60.0
"""Longest wait for ranks that have never reported."""
STACKS_S = 20.0
"""Longest wait for stacks."""
DUMPED_CULPRITS = 4
"""Hung ranks whose stacks are taken; one healthy rank's is added."""


@dataclass
class OpenHang:
    """A hang whose stacks are being collected."""

    hang: HangFinding
    wanted: set[int]
    stacks: dict[int, str]
    until: float


class Standstill:
    """Detects and reports a run that hangs or has lost a rank."""

    def __init__(self, run: Watched) -> None:
        self.run = run
        self.watch = HangWatch(run.config.hang_s, run.grid)
        self.beats: dict[int, tuple[float, list[Beat]]] = {}
        self.open_hang: OpenHang | None = None
        self.has_ended_ranks = False
        self.next_check = 0.0
        self.first_beat: float | None = None
        self.said_who_is_missing = False
        self.suspensions = Suspensions()
        self.ran_at = -math.inf
        """Time of the last report of a rank that was not stopped."""
        self.suspended_at: float | None = None
        """Start of the suspension not yet counted: the last sign that a rank ran, then the last check."""

    def hear(self, node: int, beats: Sequence[Beat], now: float) -> None:
        """Records the heartbeats of a node's ranks."""
        self.beats[node] = (now, list(beats))
        if any(beat.state == GONE for beat in beats):
            self.next_check = now

    def take_stack(self, rank: int, text: str) -> list[NodeCommand]:
        """Records a requested stack; reports the hang after the last one."""
        if self.open_hang is None:
            return []
        self.open_hang.stacks[rank] = text
        return self.close_hang(self.open_hang) if self.is_complete(self.open_hang) else []

    def is_complete(self, case: OpenHang) -> bool:
        """Whether all stacks have arrived and, for a death, the note of it: busy nodes write notes late."""
        known = not case.hang.died or not notes_deaths() or self.first_of(case.hang) is not case.hang
        return known and case.wanted <= case.stacks.keys()

    def look(self, now: float) -> list[NodeCommand]:
        """Checks for a hang if a check is due; closes an open hang after its timeout."""
        if self.open_hang is not None:
            is_over = now > self.open_hang.until or self.is_complete(self.open_hang)
            return self.close_hang(self.open_hang) if is_over else []
        if self.has_ended_ranks:  # their deaths are expected
            return []
        if now < self.next_check:
            return []
        self.next_check = now + CHECK_S
        self.note_suspension(now)
        beats = [aged(beat, at, now, self.suspensions) for at, group in self.beats.values() for beat in group]
        if len(beats) < len(self.run.hosts) and not self.begins_without(beats, now):
            return []
        hang = self.watch.observe(beats)
        return self.begin_hang(hang, now) if hang else []

    def note_suspension(self, now: float) -> None:
        """Excludes time in which every live rank is stopped by a signal: the whole run is suspended.

        The span runs from the last sign that a rank ran (a report or a heartbeat) to the first check that sees one
        run: heartbeats and checks are a second apart each, and the gap would otherwise count as silence. Silence
        before a suspension still counts, however often the run is suspended.
        """
        alive = [(at, beat) for at, group in self.beats.values() for beat in group if beat.state not in (ENDED, GONE)]
        running = [at for at, beat in alive if beat.state != STOPPED]
        stopped = bool(alive) and not running
        self.ran_at = max(running, default=self.ran_at)
        if stopped and self.suspended_at is None:
            self.run.say("every rank is stopped by a signal: until they continue, time does not count", False)
            self.suspended_at = max(self.ran_at, *(at - beat.age_s for at, beat in alive))
        if self.suspended_at is not None:
            self.suspensions.add(self.suspended_at, now)
            self.suspended_at = now if stopped else None

    def begins_without(self, beats: list[Beat], now: float) -> bool:
        """Whether to check without ranks that have never reported: their time is up. Says once who is missing."""
        if self.first_beat is None and beats:
            self.first_beat = now
        if self.first_beat is None or self.suspensions.running(self.first_beat, now) < JOIN_S:
            return False
        if not self.said_who_is_missing:
            self.said_who_is_missing = True
            missing = sorted(set(range(len(self.run.hosts))) - {beat.rank for beat in beats})
            self.run.say(
                f"the monitor has not heard from the agents of ranks {sentence.numbers(missing)}: it cannot watch them",
                False,
            )
        return bool(beats)

    def first_of(self, hang: HangFinding) -> HangFinding:
        """If several ranks have died, keeps the first death noted: the launcher ended the others because of it."""
        known = noted_deaths(self.run.folder, self.run.attempt) if hang.died else []
        noted = [noted.rank for noted in known if noted.code not in (-signal.SIGTERM, MPI_ERR_UNKNOWN)]
        first = tuple(beat for beat in hang.culprits if beat.rank in noted[:1])
        return replace(hang, culprits=first) if first else hang

    def begin_hang(self, hang: HangFinding, now: float) -> list[NodeCommand]:
        """Requests the stacks of ranks that never arrived and of one waiting rank."""
        living = [
            beat for beat in (*hang.culprits[:DUMPED_CULPRITS], *hang.waiting[:1]) if beat.state not in (ENDED, GONE)
        ]
        if hang.died:
            living = []  # the launcher ends the others within milliseconds, too soon for stacks
        elif not hang.culprits:
            living = list(hang.waiting[:DUMPED_CULPRITS])
        until = now + (LATE_NOTE_S if hang.died else STACKS_S)
        self.open_hang = OpenHang(hang, {beat.rank for beat in living}, {}, until)
        if not living:
            return self.look(now)
        by_node: dict[int, list[int]] = {}
        for beat in living:
            by_node.setdefault(self.run.nodes[beat.rank], []).append(beat.rank)
        return [NodeCommand(node, Message("dump", {"ranks": ranks})) for node, ranks in by_node.items()]

    def close_hang(self, case: OpenHang) -> list[NodeCommand]:
        """Writes the stacks and the event, then ends the ranks if ``on_hang`` is abort."""
        self.open_hang = None
        hang = self.first_of(case.hang)
        steps = self.run.first_step + max(beat.steps for beat in (*hang.culprits, *hang.waiting))
        files = {}
        for rank in sorted(case.wanted):
            path = self.run.folder.monitor / f"stack-{self.run.attempt}-{steps}-rank{rank}.txt"
            stack = case.stacks.get(rank, "no stack: the agent of this rank's node did not answer\n")
            try:
                write_atomically(path, stack.encode(), self.run.folder.path)
                files[rank] = str(path.relative_to(self.run.folder.path))
            except RunFailed as error:  # the ranks must be ended anyway
                self.run.say(f"the monitor cannot write stacks: {error.what}", True)
        action = self.run.config.on_hang
        text = sentence.of_hang(hang, self.run.hosts, action, self.run.grid)
        waiting = {} if hang.died else collectives.read(self.run.folder, self.run.attempt, range(len(self.run.hosts)))
        if missing := collectives.who_is_missing(waiting):
            text = f"{text}; {missing}"
        self.run.say(text, True)

        self.tell(hang, "died" if hang.died else "hung", steps, action, text, files)
        if action != "abort":
            return []
        self.has_ended_ranks = True
        return [NodeCommand(node, Message("kill")) for node in sorted(set(self.run.nodes))]

    def cut_off(self, node: int) -> None:
        """Reports that a node's host does not answer.

        Ends no rank: the supervisor continues without the host if it can; otherwise the host may return.
        """
        living = [beat for beat in self.beats.get(node, (0.0, []))[1] if beat.state not in (ENDED, GONE)]
        if living and not self.has_ended_ranks:
            hang = HangFinding(UNANSWERED_S, tuple(replace(beat, state=SILENT) for beat in living), (), died=False)
            host = self.run.hosts[living[0].rank]
            ranks = sentence.numbers([beat.rank for beat in living])
            text = f"{host} (ranks {ranks}) cannot be reached: it is down, or its network is cut"
            steps = self.run.first_step + max(beat.steps for beat in living)
            self.run.say(text, True)
            self.tell(hang, CUT_OFF, steps, "report", text, {})

    def tell(self, hang: HangFinding, kind: str, step: int, action: str, text: str, files: Mapping[int, str]) -> None:
        """Writes the event; ``files`` are the stack files by rank."""

        def about(beat: Beat) -> AboutRank:
            host, stack = self.run.hosts[beat.rank], files.get(beat.rank)
            return AboutRank(beat.rank, host, beat.steps, beat.state, beat.doing, stack)

        event = HangEvent(
            step=step,
            attempt=self.run.attempt,
            kind=kind,
            silence_s=round(hang.silence_s, 1),
            ranks=tuple(map(about, hang.culprits)),
            healthy=tuple(about(beat) for beat in hang.waiting if beat.rank in files),
            waiting=len(hang.waiting),
            action=action,
            sentence=text,
        )
        self.run.events.append(event)


def aged(beat: Beat, at: float, now: float, suspensions: Suspensions) -> Beat:
    """Updates a heartbeat's age and state to the current time."""
    lost = suspensions.running(at, now) > SILENT_S and beat.state not in (ENDED, GONE)
    return replace(beat, age_s=suspensions.running(at - beat.age_s, now), state=SILENT if lost else beat.state)

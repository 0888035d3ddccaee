"""The deciding side: collects the nodes' reports, judges windows, watches for hangs, writes events, asks for stacks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.config.sections import MonitorConfig
from hpctrain.errors import RunFailed
from hpctrain.monitor import window
from hpctrain.monitor.chief import sentence
from hpctrain.monitor.chief.exclude import exclude, is_the_hosts_own
from hpctrain.monitor.chief.finding import Finding, Kind, State
from hpctrain.monitor.chief.hang import ENDED, GONE, SILENT, STOPPED, Beat, Hang, HangWatch
from hpctrain.monitor.chief.heat import Heat
from hpctrain.monitor.chief.judge import Judge, Measures
from hpctrain.monitor.chief.peers import Move, evening
from hpctrain.monitor.chief.suspensions import Suspensions
from hpctrain.monitor.node.node import window_of
from hpctrain.monitor.wire import Message
from hpctrain.run import EventWriter, bad_nodes
from hpctrain.run.bad_nodes import BadNode
from hpctrain.run.events import AboutRank, Straggler
from hpctrain.run.events import Hang as HangEvent
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.system.files import write_atomically

PENDING_WINDOWS = 8
"""Windows that may be incomplete at a time; the oldest is judged without the missing ranks."""
CHECK_S = 1.0
"""Seconds between looks for a hang, which cost time for each rank; a death is looked at at once."""
LIVE_S = 3.0
"""Seconds between refreshes of the live view's file."""
SILENT_S = 10.0
"""Age of a heartbeat from which on its node is called silent."""
JOIN_S = 60.0
"""Longest wait for ranks that have never been heard of."""
FRESH_S = 60.0
"""Age up to which host findings are evidence."""
STACKS_S = 20.0
"""Longest wait for stacks."""
DUMPED_CULPRITS = 4
"""Hung ranks whose stacks are taken; one healthy rank's is added."""


@dataclass(frozen=True)
class NodeCommand:
    """A message to one node's agent."""

    node: int
    message: Message


@dataclass
class OpenHang:
    """A hang whose stacks are awaited."""

    hang: Hang
    wanted: set[int]
    stacks: dict[int, str]
    until: float


class Chief:
    """Decides for the whole run. Knows messages and the run folder; sockets and processes are the agent's.

    Args:
        hosts: [N] host of each rank.
        nodes: [N] node index of each rank.
        folder: the run folder.
        attempt: number of this attempt.
        config: the monitor section.
        say: takes a sentence for the log; the flag says that rank 0 may not be able to print it.
        grid: places of the ranks; by default each has the whole model.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        nodes: Sequence[int],
        folder: RunDir,
        attempt: int,
        config: MonitorConfig,
        say: Callable[[str, bool], None],
        grid: Grid | None = None,
    ) -> None:
        self.hosts = tuple(hosts)
        self.nodes = tuple(nodes)
        self.folder = folder
        self.attempt = attempt
        self.config = config
        self.say = say
        self.events = EventWriter(folder.monitor_events, lambda text: say(text, False))
        self.grid = grid or Grid(len(hosts))
        self.judge = Judge(hosts, grid=self.grid)
        self.watch = HangWatch(config.hang_s, self.grid)
        self.heat = Heat(len(hosts), config.window_steps)
        self.pending: dict[int, tuple[list[window.Window], int]] = {}
        """Parts of windows that are not judged yet, and how many ranks they hold."""
        self.judged = -1
        self.beats: dict[int, tuple[float, list[Beat]]] = {}
        self.findings: dict[str, tuple[float, tuple[str, ...]]] = {}
        self.dropped: dict[int, int] = {}
        self.first_step = 0
        self.layers: dict[int, int] = {}
        """Layers of the ranks' stages, as far as there are stages."""
        self.active: dict[tuple[Kind, tuple[int, ...]], str] = {}
        """Confirmed findings, in words; the ranks are those of findings that name somebody."""
        self.suspects: list[str] = []
        """Findings of the last window only."""
        self.shown: Measures | None = None
        self.open_hang: OpenHang | None = None
        self.has_ended_ranks = False
        self.next_live = 0.0
        self.next_check = 0.0
        self.first_beat: float | None = None
        self.said_who_is_missing = False
        self.suspensions = Suspensions()
        self.ran_at = -math.inf
        """The last report of a rank that was not stopped."""
        self.suspended_at: float | None = None
        """What is not yet counted of a suspension begins here: what last told that a rank ran, then the last look."""

    def receive(self, message: Message, now: float) -> list[NodeCommand]:
        """Takes in one report."""
        fields = message.fields
        if message.kind == "window":
            return self.add(window_of(message))
        if message.kind == "beat":
            beats = [Beat(*beat) for beat in fields["beats"]]
            self.beats[fields["node"]] = (now, beats)
            if any(beat.state == GONE for beat in beats):
                self.next_check = now
            self.dropped[fields["node"]] = fields["dropped"]
            self.first_step = max(self.first_step, fields["first_step"])
            self.layers.update({rank: count for rank, count in fields.get("layers", ()) if count})
        elif message.kind == "findings":
            for rank, lines in fields["ranks"].items():
                self.findings[f"rank {rank}"] = (now, tuple(lines))
            self.findings[f"node {fields['node']}"] = (now, tuple(fields["host"]))
        elif message.kind == "dumped" and self.open_hang is not None:
            self.open_hang.stacks[fields["rank"]] = fields["text"]
            if self.open_hang.wanted <= self.open_hang.stacks.keys():
                return self.close_hang(self.open_hang)
        return []

    def tick(self, now: float) -> list[NodeCommand]:
        """What time alone brings about."""
        if now >= self.next_live:
            self.next_live = now + LIVE_S
            self.write_live()
        if self.open_hang is not None:
            return self.close_hang(self.open_hang) if now > self.open_hang.until else []
        if self.has_ended_ranks:  # it is known that they are gone
            return []
        if now < self.next_check:
            return []
        self.next_check = now + CHECK_S
        self.note_suspension(now)
        beats = [aged(beat, at, now, self.suspensions) for at, group in self.beats.values() for beat in group]
        if len(beats) < len(self.hosts) and not self.begins_without(beats, now):
            return []
        hang = self.watch.observe(beats)
        return self.begin_hang(hang, now) if hang else []

    def note_suspension(self, now: float) -> None:
        """Time in which every rank that lives is stopped by a signal does not count: somebody holds the whole run.

        It reaches from what last told that a rank ran, a report or a sign of life, to the first look that sees one run:
        beats and looks are a second apart each, and what lies between them would count as silence otherwise. A hang
        from before goes on afterwards, however often the run is suspended.
        """
        told = [(at, beat) for at, group in self.beats.values() for beat in group if beat.state not in (ENDED, GONE)]
        running = [at for at, beat in told if beat.state != STOPPED]
        stopped = bool(told) and not running
        self.ran_at = max(running, default=self.ran_at)
        if stopped and self.suspended_at is None:
            self.say("every rank is stopped by a signal: until they continue, time does not count", False)
            self.suspended_at = max(self.ran_at, *(at - beat.age_s for at, beat in told))
        if self.suspended_at is not None:
            self.suspensions.add(self.suspended_at, now)
            self.suspended_at = now if stopped else None

    def observer_stopped(self, begin: float, end: float) -> None:
        """The agent itself did not run between two moments, and perhaps the ranks did not either."""
        self.suspensions.add(begin, end)

    def begins_without(self, beats: list[Beat], now: float) -> bool:
        """Whether the wait for ranks that have never been heard of is over; says once that it is."""
        if self.first_beat is None and beats:
            self.first_beat = now
        if self.first_beat is None or self.suspensions.running(self.first_beat, now) < JOIN_S:
            return False
        if not self.said_who_is_missing:
            self.said_who_is_missing = True
            missing = sorted(set(range(len(self.hosts))) - {beat.rank for beat in beats})
            self.say(f"no word from the agents of ranks {sentence.numbers(missing)}: they are not watched", False)
        return bool(beats)

    # windows

    def add(self, part: window.Window) -> list[NodeCommand]:
        """Adds one node's part of a window, and judges the window when it is complete or too old."""
        if part.index <= self.judged:
            return []
        parts, ranks = self.pending.get(part.index, ([], 0))
        parts.append(part)
        self.pending[part.index] = parts, ranks + len(part.ranks)
        last = part.index if ranks + len(part.ranks) == len(self.hosts) else -1
        commands = []
        while self.pending and (min(self.pending) <= last or len(self.pending) > PENDING_WINDOWS):
            self.judged = min(self.pending)
            parts, ranks = self.pending.pop(self.judged)
            if 2 * ranks >= len(self.hosts):
                commands += self.decide(window.join(parts))
        return commands

    def decide(self, now: window.Window) -> list[NodeCommand]:
        """Judges one window and reports what it changed; has the hosts of suspected ranks examined."""
        verdicts = self.judge.judge(now)
        if self.judge.measures is not None and self.judge.measures.window is now:
            self.heat.add(now.index, now.ranks, self.judge.measures.excess)
        self.suspects.clear()
        self.drop_cleared()
        for verdict in verdicts:
            place = self.grid.told(verdict.ranks[0]) if len(verdict.ranks) == 1 else ""
            self.tell(replace(self.with_evidence(verdict), place=place, move=self.move_of(verdict)))
        suspects = [rank for verdict in verdicts if verdict.state is State.SUSPECT for rank in verdict.ranks]
        return [NodeCommand(node, Message("look")) for node in sorted({self.nodes[rank] for rank in suspects})]

    def drop_cleared(self) -> None:
        """Ends findings none of whose ranks is slow any more: ranks that were named together clear one by one."""
        for kind, ranks in list(self.active):
            if kind in (Kind.RANK, Kind.HOST) and not self.judge.accused.confirmed[list(ranks)].any():
                del self.active[kind, ranks]

    def with_evidence(self, verdict: Finding) -> Finding:
        """Adds what the counters of the named ranks' hosts say, unless it is about no host."""
        if verdict.kind is Kind.PLAN:
            return verdict
        keys = [f"rank {rank}" for rank in verdict.ranks[:8]]
        keys += sorted({f"node {self.nodes[rank]}" for rank in verdict.ranks[:8]})
        now = time.monotonic()
        lines = [
            line
            for key in keys
            if key in self.findings
            for at, found in [self.findings[key]]
            if now - at < FRESH_S
            for line in found
        ]
        return replace(verdict, evidence=tuple(dict.fromkeys(lines)))

    def move_of(self, verdict: Finding) -> Move | None:
        """What would even out the stages that it is about."""
        if verdict.load is None or verdict.load.axis != "stage":
            return None
        stage_of = {rank: self.grid.place(rank).stage for rank in self.layers}
        return evening(verdict.load, {stage_of[rank]: count for rank, count in self.layers.items()})

    def tell(self, verdict: Finding) -> None:
        """Log, event, live view, and the exclusion list."""
        text = sentence.of_verdict(verdict)
        key = verdict.kind, verdict.ranks if verdict.kind in (Kind.RANK, Kind.PAUSES, Kind.HOST) else ()
        if verdict.state is State.SUSPECT:
            self.suspects.append(text)
            return
        if verdict.state is State.CLEARED:
            self.active.pop(key, None)
        else:
            self.active[key] = text
        self.say(text, False)
        step = self.first_step + (verdict.window + 1) * self.config.window_steps
        excluded = False
        if self.config.action == "exclude_on_requeue" and is_the_hosts_own(verdict, self.hosts):
            now = time.time()
            until = now + 3600 * self.config.exclude_hours
            entry = BadNode(verdict.hosts[0], until, self.attempt, text, str(self.folder.path))
            try:
                excluded = exclude(bad_nodes.of_run(self.folder), entry, now)
            except RunFailed as error:
                self.say(f"the monitor cannot exclude {entry.host}: {error.what}", False)
            if excluded:
                self.say(
                    f"host {entry.host} is left out at the next requeue, for {self.config.exclude_hours:g} h", False
                )
        event = Straggler(step=step, attempt=self.attempt, **verdict.fields(), sentence=text, excluded=excluded)
        self.events.append(event)

    # hangs

    def begin_hang(self, hang: Hang, now: float) -> list[NodeCommand]:
        """Asks for the stacks of those who never arrived and of one that waits."""
        living = [
            beat for beat in (*hang.culprits[:DUMPED_CULPRITS], *hang.waiting[:1]) if beat.state not in (ENDED, GONE)
        ]
        if hang.died:
            living = []  # the launcher ends the others within milliseconds: there is nothing to read
        elif not hang.culprits:
            living = list(hang.waiting[:DUMPED_CULPRITS])
        self.open_hang = OpenHang(hang, {beat.rank for beat in living}, {}, now + STACKS_S)
        if not living:
            return self.close_hang(self.open_hang)
        by_node: dict[int, list[int]] = {}
        for beat in living:
            by_node.setdefault(self.nodes[beat.rank], []).append(beat.rank)
        return [NodeCommand(node, Message("dump", {"ranks": ranks})) for node, ranks in by_node.items()]

    def close_hang(self, case: OpenHang) -> list[NodeCommand]:
        """Writes the stacks and the event; then what the run file wants."""
        self.open_hang = None
        hang = case.hang
        steps = self.first_step + max(beat.steps for beat in (*hang.culprits, *hang.waiting))
        files = {}
        for rank in sorted(case.wanted):
            path = self.folder.monitor / f"stack-{self.attempt}-{steps}-rank{rank}.txt"
            stack = case.stacks.get(rank, "no stack: the agent of this rank's node did not answer\n")
            try:
                write_atomically(path, stack.encode(), self.folder.path)
                files[rank] = str(path.relative_to(self.folder.path))
            except RunFailed as error:  # the ranks are to be ended all the same
                self.say(f"the monitor cannot write stacks: {error.what}", True)
        action = self.config.on_hang
        text = sentence.of_hang(hang, self.hosts, action, self.grid)
        self.say(text, True)

        def about(beat: Beat) -> AboutRank:
            host, stack = self.hosts[beat.rank], files.get(beat.rank)
            return AboutRank(beat.rank, host, beat.steps, beat.state, beat.doing, stack)

        event = HangEvent(
            step=steps,
            attempt=self.attempt,
            kind="died" if hang.died else "hung",
            silence_s=round(hang.silence_s, 1),
            ranks=tuple(map(about, hang.culprits)),
            healthy=tuple(about(beat) for beat in hang.waiting if beat.rank in files),
            waiting=len(hang.waiting),
            action=action,
            sentence=text,
        )
        self.events.append(event)
        if action != "abort":
            return []
        self.has_ended_ranks = True
        return [NodeCommand(node, Message("kill")) for node in sorted(set(self.nodes))]

    # files

    def write_live(self) -> None:
        """Refreshes what ``hpctrain watch`` shows."""
        measures = self.judge.measures
        if measures is None or measures is self.shown:
            return
        self.shown = measures
        try:
            content = json.dumps(self.live(measures)).encode()
            write_atomically(self.folder.live_view, content, self.folder.path)
        except RunFailed as error:
            self.say(f"the monitor cannot write its live view: {error.what}", False)

    def live(self, measures: Measures, most: int = 64) -> dict[str, object]:
        """The last window: all ranks, or the busiest ones if there are many."""
        now = measures.window
        busy, wait = np.median(now.busy, axis=1), np.median(now.wait, axis=1)
        shown = sorted(np.argsort(-measures.excess)[:most].tolist())
        return {
            "time": time.time(),
            "attempt": self.attempt,
            "step": self.first_step + (now.index + 1) * now.steps,
            "num_ranks": len(self.hosts),
            "ranks": [
                {
                    "rank": int(now.ranks[place]),
                    "host": self.hosts[now.ranks[place]],
                    "busy_s": float(busy[place]),
                    "wait_s": float(wait[place]),
                    "excess": float(measures.excess[place]),
                    "cost": float(measures.cost[place]),
                }
                for place in shown
            ],
            "verdicts": [*self.active.values(), *self.suspects],
            "dropped_windows": sum(self.dropped.values()),
        }

    def close(self) -> None:
        """Last view, the events that still wait, and the heat map's data."""
        self.write_live()
        self.events.close()
        if self.heat.used:
            try:
                self.heat.save(self.folder.heat_map, self.folder.path)
            except RunFailed as error:
                self.say(f"the monitor cannot write its heat map: {error.what}", False)


def aged(beat: Beat, at: float, now: float, suspensions: Suspensions) -> Beat:
    """A heartbeat some time after it was reported."""
    lost = suspensions.running(at, now) > SILENT_S and beat.state not in (ENDED, GONE)
    return replace(beat, age_s=suspensions.running(at - beat.age_s, now), state=SILENT if lost else beat.state)

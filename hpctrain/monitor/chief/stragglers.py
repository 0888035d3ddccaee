"""Handles slow ranks: collects windows, passes them to the judge, and reports what changed, with evidence."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from hpctrain.errors import RunFailed
from hpctrain.monitor import window
from hpctrain.monitor.chief import sentence
from hpctrain.monitor.chief.finding import Finding, FindingState, Kind, NodeCommand, Watched
from hpctrain.monitor.chief.judge import Judge, Measures
from hpctrain.monitor.chief.slowness import COMPUTE
from hpctrain.monitor.framing import Message
from hpctrain.run.events import RankDevice, Straggler
from hpctrain.run.run_status import LiveRank, LiveWindow
from hpctrain.run.time_account import SHORT_S
from hpctrain.system.array_types import Ints, Reals
from hpctrain.system.files import write_atomically

COLUMNS = 512
"""Columns of the heat map; when it is full, neighbouring columns are merged to their maximum."""


class Heat:
    """Heat map: each rank's excess by window, as a matrix [ranks, COLUMNS].

    Args:
        ranks: number of ranks.
        window_steps: steps of a window.
    """

    def __init__(self, ranks: int, window_steps: int) -> None:
        self.values = np.full((ranks, COLUMNS), np.nan, dtype=np.float16)
        self.steps_per_column = window_steps
        self.window_steps = window_steps
        self.used = 0

    def add(self, index: int, ranks: Ints, excess: Reals) -> None:
        """Adds a window."""
        while (column := index * self.window_steps // self.steps_per_column) >= COLUMNS:
            self.values[:, : COLUMNS // 2] = np.fmax(self.values[:, ::2], self.values[:, 1::2])
            self.values[:, COLUMNS // 2 :] = np.nan
            self.steps_per_column *= 2
        self.values[ranks, column] = np.fmax(self.values[ranks, column], excess.astype(np.float16))
        self.used = max(self.used, column + 1) if self.steps_per_column == self.window_steps else column + 1

    def save(self, path: Path, root: Path | None = None) -> None:
        """Writes the matrix for the report; follows no symbolic link below ``root``.

        Raises:
            RunFailed: it cannot be written.
        """
        content = io.BytesIO()
        np.savez_compressed(content, excess=self.values[:, : self.used], steps_per_column=self.steps_per_column)
        write_atomically(path, content.getvalue(), root)


def is_the_hosts_own(verdict: Finding, hosts: Sequence[str]) -> bool:
    """Whether another host would help: confirmed slow computing on all ranks of the host, shown by its counters."""
    return (
        verdict.state is FindingState.CONFIRMED
        and verdict.kind in (Kind.RANK, Kind.HOST)
        and verdict.cause == COMPUTE
        and bool(verdict.evidence)
        and len(verdict.hosts) == 1
        and len(verdict.ranks) == list(hosts).count(verdict.hosts[0])
        and len(set(hosts)) > 1
    )


PENDING_WINDOWS = 8
"""Largest number of incomplete windows; beyond it the oldest is judged without the missing ranks."""
LIVE_S = 3.0
"""Seconds between refreshes of the live view's file."""
FRESH_S = 60.0
"""Age up to which host findings count as evidence."""
LASTING_S = 30.0
"""Shortest duration of a finding that blames no rank for its end to be worth a line in the log."""
EARLY = (Kind.ROTATING, Kind.IMBALANCE, Kind.GLOBAL, Kind.UNEVEN)
"""Findings that name no slow rank and that the first steps of any run may show by chance."""


class Stragglers:
    """Reports slow ranks to the log, the events, the live view, the heat map and the list of excluded nodes."""

    def __init__(self, run: Watched, devices: Mapping[int, RankDevice] = MappingProxyType({})) -> None:
        self.run, self.devices = run, devices
        self.judge = Judge(run.hosts, grid=run.grid)
        self.heat = Heat(len(run.hosts), run.config.window_steps)
        self.pending: dict[int, tuple[list[window.Window], int]] = {}
        """Parts of windows not yet judged, and the number of ranks they hold, by window number."""
        self.judged = -1
        self.findings: dict[str, tuple[float, tuple[str, ...]]] = {}
        self.dropped: dict[int, int] = {}
        self.active: dict[tuple[Kind, tuple[int, ...]], str] = {}
        """Confirmed findings, in words; the key holds the ranks only for findings that blame particular ones."""
        self.confirmed_at: dict[tuple[Kind, tuple[int, ...]], float] = {}
        """Monotonic time of each finding's confirmation, by the same key."""
        self.suspects: list[str] = []
        """Suspicions of the last window, in words."""
        self.began = time.monotonic()
        self.early: dict[Kind, Finding] = {}
        """The newest EARLY finding of each kind in the first SHORT_S."""
        self.shown: Measures | None = None
        self.next_live = 0.0

    def find(self, node: int, host: Sequence[str], ranks: Mapping[str, Sequence[str]], now: float) -> None:
        """Records what a node's counters show about its host and ranks."""
        for rank, lines in ranks.items():
            self.findings[f"rank {rank}"] = (now, tuple(lines))
        self.findings[f"node {node}"] = (now, tuple(host))

    def add(self, part: window.Window) -> list[NodeCommand]:
        """Adds one node's part of a window; judges windows that are complete or too old."""
        if part.index <= self.judged:
            return []
        parts, ranks = self.pending.get(part.index, ([], 0))
        parts.append(part)
        self.pending[part.index] = parts, ranks + len(part.ranks)
        last = part.index if ranks + len(part.ranks) == len(self.run.hosts) else -1
        commands = []
        while self.pending and (min(self.pending) <= last or len(self.pending) > PENDING_WINDOWS):
            self.judged = min(self.pending)
            parts, ranks = self.pending.pop(self.judged)
            if 2 * ranks >= len(self.run.hosts):
                commands += self.decide(window.join(parts))
        return commands

    def decide(self, now: window.Window) -> list[NodeCommand]:
        """Judges one window and reports what it changed; returns commands to examine hosts of suspected ranks."""
        verdicts = self.timely(self.judge.judge(now))
        if self.judge.measures is not None and self.judge.measures.window is now:
            self.heat.add(now.index, now.ranks, self.judge.measures.excess)
        self.suspects.clear()
        self.drop_cleared()
        for verdict in verdicts:
            place = self.run.grid.label(verdict.ranks[0]) if len(verdict.ranks) == 1 else ""
            self.tell(replace(self.with_evidence(verdict), place=place))
        suspects = [rank for verdict in verdicts if verdict.state is FindingState.SUSPECT for rank in verdict.ranks]
        return [NodeCommand(node, Message("look")) for node in sorted({self.run.nodes[rank] for rank in suspects})]

    def timely(self, found: list[Finding]) -> list[Finding]:
        """Holds back EARLY findings in the first SHORT_S; then adds those that have lasted."""
        if time.monotonic() - self.began < SHORT_S:
            self.early |= {each.kind: each for each in found if each.kind in EARLY}
            return [each for each in found if each.kind not in EARLY]
        lasted = [each for each in self.early.values() if each.state is FindingState.CONFIRMED]
        self.early.clear()
        return [*lasted, *found]

    def drop_cleared(self) -> None:
        """Removes findings none of whose ranks is slow any longer: ranks named together clear one by one."""
        for kind, ranks in list(self.active):
            if kind in (Kind.RANK, Kind.HOST) and not self.judge.accused.confirmed[list(ranks)].any():
                del self.active[kind, ranks]

    def with_evidence(self, verdict: Finding) -> Finding:
        """Adds recent evidence from the named ranks' hosts; an uneven plan is not about hosts and gets none."""
        if verdict.kind is Kind.PLAN:
            return verdict
        keys = [f"rank {rank}" for rank in verdict.ranks[:8]]
        keys += sorted({f"node {self.run.nodes[rank]}" for rank in verdict.ranks[:8]})
        lines: list[str] = []
        for key in filter(self.findings.__contains__, keys):
            at, found = self.findings[key]
            if time.monotonic() - at < FRESH_S:
                lines += found
        return replace(verdict, evidence=tuple(dict.fromkeys(lines)))

    def tell(self, verdict: Finding) -> None:
        """Reports a finding to the log, events, live view and exclusion list."""
        text = sentence.of_verdict(verdict)
        key = verdict.kind, verdict.ranks if verdict.kind in (Kind.RANK, Kind.PAUSES, Kind.HOST) else ()
        if verdict.state is FindingState.SUSPECT:
            self.suspects.append(text)
            return
        if verdict.state is FindingState.CLEARED:
            self.active.pop(key, None)
            is_news = key[1] != () or time.monotonic() - self.confirmed_at.pop(key, 0.0) >= LASTING_S
        else:
            self.active[key], self.confirmed_at[key], is_news = text, time.monotonic(), True
        if is_news:
            self.run.say(text, False)
        step = self.run.first_step + (verdict.window + 1) * self.run.config.window_steps
        excluded = False
        if self.run.config.action == "exclude_on_requeue" and is_the_hosts_own(verdict, self.run.hosts):
            host, hours = verdict.hosts[0], self.run.config.exclude_hours
            excluded = self.run.exclude(host, text)
            if excluded:
                self.run.say(f"host {host} is excluded at the next requeue, for {hours:g} h", False)
        event = Straggler(step=step, attempt=self.run.attempt, **verdict.fields(), sentence=text, excluded=excluded)
        self.run.events.append(event)

    # files

    def refresh(self, now: float) -> None:
        """Writes the live view every LIVE_S seconds."""
        if now >= self.next_live:
            self.next_live = now + LIVE_S
            self.write_live()

    def write_live(self) -> None:
        """Writes the file that ``hpctrain watch`` shows, if there is a new window."""
        measures = self.judge.measures
        if measures is None or measures is self.shown:
            return
        self.shown = measures
        try:
            content = json.dumps({"time": time.time(), **asdict(self.live(measures))}).encode()
            write_atomically(self.run.folder.live_view, content, self.run.folder.path)
        except RunFailed as error:
            self.run.say(f"the monitor cannot write its live view: {error.what}", False)

    def live(self, measures: Measures, most: int = 64) -> LiveWindow:
        """The last window: all ranks, or the ``most`` with the largest excess."""
        now = measures.window
        busy = np.median(now.busy, axis=1)
        wait = np.median(now.wait, axis=1)
        shown = sorted(np.argsort(-measures.excess)[:most].tolist())
        rows = np.stack([busy, wait, measures.excess, measures.cost])[:, shown].T.tolist()
        ranks = now.ranks[shown].tolist()
        return LiveWindow(
            attempt=self.run.attempt,
            step=self.run.first_step + (now.index + 1) * now.steps,
            num_ranks=len(self.run.hosts),
            ranks=tuple(LiveRank(rank, self.run.hosts[rank], *row) for rank, row in zip(ranks, rows, strict=True)),
            verdicts=(*self.active.values(), *self.suspects),
            dropped_windows=sum(self.dropped.values()),
            devices=tuple(self.devices[rank] for rank in ranks if rank in self.devices),
        )

    def close(self) -> None:
        """Writes the last live view and the heat map."""
        self.write_live()
        if self.heat.used:
            try:
                self.heat.save(self.run.folder.heat_map, self.run.folder.path)
            except RunFailed as error:
                self.run.say(f"the monitor cannot write its heat map: {error.what}", False)

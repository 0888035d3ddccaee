"""Collects the nodes' reports on GPUs and energy: writes them as events, and excludes hosts whose GPUs are broken."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.monitor.chief.finding import FindingState, Kind, Watched
from hpctrain.run.events import Devices, RankDevice, Straggler

EVENT_S, RANK_S = 600.0, 0.6
"""Seconds between events, at least, and for each rank, of which an event has a row: many ranks must not fill a disk."""


class DeviceReports:
    """The newest report of each node."""

    def __init__(self, run: Watched) -> None:
        self.run = run
        self.joules: dict[int, Mapping[str, float]] = {}
        self.ranks: dict[int, RankDevice] = {}
        self.next_event = time.monotonic() + EVENT_S / 10

    def hear(
        self, node: int, joules: Mapping[str, float], rows: Sequence[Mapping[str, Any]], broken: Sequence[str]
    ) -> None:
        """Records a node's report."""
        self.joules[node] = joules
        for row in rows:
            slowed = tuple(row.get("slowed", ()))
            self.ranks[row["rank"]] = RankDevice(**{**row, "host": self.run.hosts[row["rank"]], "slowed": slowed})
        for what in broken:
            self.accuse(self.run.hosts[self.run.nodes.index(node)], what)

    def accuse(self, host: str, what: str) -> None:
        """Reports a broken GPU, and excludes its host from later attempts if there are others."""
        text = f"{what} on {host}"
        excluded = len(set(self.run.hosts)) > 1 and self.run.exclude(host, text)
        text += f"; the host is excluded from the next requeue, for {self.run.config.exclude_hours:g} h" * excluded
        self.run.say(text, True)
        event = Straggler(
            step=self.run.first_step,
            attempt=self.run.attempt,
            kind=Kind.HOST.value,
            state=FindingState.CONFIRMED.value,
            host=host,
            cause="gpu",
            cost=1.0,
            sentence=text,
            excluded=excluded,
        )
        self.run.events.append(event)

    def tick(self, now: float) -> None:
        """Writes an event if one is due."""
        if now >= self.next_event:
            self.next_event = now + max(EVENT_S, RANK_S * len(self.ranks))
            self.write()

    def write(self) -> None:
        """Writes an event, if anything is known."""
        totals: dict[str, float] = {}
        for part, joules in (pair for spent in self.joules.values() for pair in spent.items()):
            totals[part] = totals.get(part, 0.0) + joules
        if totals or self.ranks:
            event = Devices(
                step=self.run.first_step,
                attempt=self.run.attempt,
                cpu_joules=totals.get("cpu"),
                gpu_joules=totals.get("gpu"),
                ranks=tuple(self.ranks[rank] for rank in sorted(self.ranks)),
            )
            self.run.events.append(event)

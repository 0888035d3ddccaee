"""What the monitor says of an attempt, to whom, and what keeps it from saying it too early or too often."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.chief.peers import Load, Move
from hpctrain.monitor.wire.framing import Message
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid

Mask = NDArray[np.bool_]
Ranks = NDArray[np.int64]

RANKS_IN_EVENT = 1000
"""Ranks that an event lists."""


class Kind(enum.StrEnum):
    """What is wrong. Only the first three name somebody."""

    RANK = "rank"
    """A rank is slower than its peers in the typical step."""
    PAUSES = "pauses"
    """A rank holds up the others with long pauses in some steps."""
    HOST = "host"
    """All ranks of a host are slower than their peers."""
    MANY = "many"
    """Too many ranks are slower to tell who is normal."""
    UNEVEN = "uneven"
    """Two or three ranks differ since the start: no telling which of them is off."""
    ROTATING = "rotating"
    """Pauses hit changing ranks: garbage collection, input or the system; no rank is to blame."""
    IMBALANCE = "imbalance"
    """Ranks have different amounts of work."""
    PLAN = "plan"
    """A stage, or a part of cut layers, takes longer than the others on whichever rank it is."""
    NETWORK = "network"
    """The exchange itself takes longer than it did."""
    GLOBAL = "global"
    """All ranks are slower than they were."""
    ABSTAIN = "abstain"
    """Signals are missing."""


class State(enum.StrEnum):
    """State of a finding."""

    SUSPECT = "suspect"
    CONFIRMED = "confirmed"
    CLEARED = "cleared"


@dataclass(frozen=True)
class Finding:
    """One finding about a window of steps."""

    kind: Kind
    state: State
    window: int
    """The window that led to it."""
    ranks: tuple[int, ...] = ()
    """Who, if somebody is named."""
    hosts: tuple[str, ...] = ()
    """The hosts of those ranks."""
    cause: str = ""
    """Phase that holds the excess (data, forward, ...), gc, compute (all phases equally), mixed, or network."""
    slowdown: float = 0.0
    """Share by which it is slower than its peers (or than it was)."""
    cost: float = 0.0
    """Share of the time that the run would save without it."""
    evidence: tuple[str, ...] = ()
    """What the host's counters say."""
    place: str = ""
    """Of the one rank, in the grid of ``parallel``; empty if its number says it all."""
    note: str = ""
    """What else to know."""
    load: Load | None = None
    """What is uneven about the plan, for Kind.PLAN."""
    move: Move | None = None
    """What would even it out, if that is known."""
    beside: bool = False
    """Another rank is named at this time: this finding concerns the other ranks."""

    def fields(self) -> dict[str, Any]:
        """For an event."""
        return {
            "kind": self.kind.value,
            "state": self.state.value,
            "rank": self.ranks[0] if len(self.ranks) == 1 else None,
            "ranks": self.ranks[:RANKS_IN_EVENT],
            "host": self.hosts[0] if len(self.hosts) == 1 else None,
            "cause": self.cause,
            "slowdown": round(self.slowdown, 4),
            "cost": round(self.cost, 4),
            "evidence": self.evidence,
            "window": self.window,
        }


class Standing:
    """Who is suspected (after one bad window), confirmed (after some in a row), or cleared (after some calm ones).

    Takes O(those observed) a window.

    Args:
        count: how many there may be, such as the ranks of the run.
        confirm_after: bad windows in a row.
        clear_after: calm windows in a row.
    """

    def __init__(self, count: int, confirm_after: int, clear_after: int) -> None:
        self.confirm_after = confirm_after
        self.clear_after = clear_after
        self.bad = np.zeros(count, dtype=np.int32)
        self.calm = np.zeros(count, dtype=np.int32)
        self.confirmed = np.zeros(count, dtype=bool)
        """[count] those who are named."""

    def observe(self, those: Ranks, bad: Mask, calm: Mask) -> dict[State, Ranks]:
        """Takes in a window; whose state it changed.

        Args:
            those: [R] whom it is about; the others keep their standing.
            bad: [R] bad ones.
            calm: [R] those far from it; one may be neither.
        """
        self.bad[those] = np.where(bad, self.bad[those] + 1, 0)
        self.calm[those] = np.where(calm & ~bad, self.calm[those] + 1, 0)
        named, since = self.confirmed[those], self.bad[those]
        confirmed = those[~named & (since >= self.confirm_after)]
        cleared = those[named & (self.calm[those] >= self.clear_after)]
        suspected = those[~named & (since == 1) & (since < self.confirm_after)]
        self.confirmed[confirmed] = True
        self.confirmed[cleared] = False
        return {State.CONFIRMED: confirmed, State.CLEARED: cleared, State.SUSPECT: suspected}


@dataclass(frozen=True)
class NodeCommand:
    """A message to one node's agent."""

    node: int
    message: Message


@dataclass
class Watched:
    """What is known of the attempt beforehand, its first step, and where sentences and events go."""

    hosts: Sequence[str]
    """[N] host of each rank."""
    nodes: Sequence[int]
    """[N] node index of each rank."""
    folder: RunDir
    attempt: int
    config: MonitorConfig
    say: Callable[[str, bool], None]
    """Takes a sentence for the log; the flag says that rank 0 may not be able to print it."""
    grid: Grid
    """Places of the ranks."""
    events: EventWriter
    first_step: int = 0
    """Of the run, in this attempt; ranks tell it."""

    def starts_at(self, step: int) -> None:
        """Some node's ranks say that this is their first step."""
        self.first_step = max(self.first_step, step)

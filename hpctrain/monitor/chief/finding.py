"""What the monitor says, and the hysteresis that keeps it from saying it too early or too often."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from hpctrain.monitor.chief.peers import Load, Move

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
    """Pauses hit changing ranks: garbage collection, input or the system, nobody to blame."""
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
    """Where an accusation stands."""

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
    """Phase that holds the excess (data, forward, ...), gc, compute (all of them alike), mixed, or network."""
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
    """Some other rank is named at this time: what nobody is blamed for comes on top of that."""

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


class Change(enum.Enum):
    """What an observation changed."""

    NONE = 0
    SUSPECTED = 1
    CONFIRMED = 2
    CLEARED = 3


@dataclass
class Hysteresis:
    """One accusation over time: suspected after one window, confirmed after some, cleared after some calm ones."""

    confirm_after: int = 2
    """Bad windows in a row."""
    clear_after: int = 3
    """Calm windows in a row."""
    bad: int = field(default=0, init=False)
    calm: int = field(default=0, init=False)
    confirmed: bool = field(default=False, init=False)

    def observe(self, is_bad: bool, is_calm: bool) -> Change:
        """Takes one window into account. A window may be neither bad nor calm."""
        self.bad = self.bad + 1 if is_bad else 0
        self.calm = self.calm + 1 if is_calm and not is_bad else 0
        if self.confirmed:
            if self.calm >= self.clear_after:
                self.confirmed = False
                return Change.CLEARED
            return Change.NONE
        if self.bad >= self.confirm_after:
            self.confirmed = True
            return Change.CONFIRMED
        return Change.SUSPECTED if self.bad == 1 else Change.NONE

    @property
    def idle(self) -> bool:
        """Nothing is suspected or confirmed."""
        return not self.confirmed and self.bad == 0

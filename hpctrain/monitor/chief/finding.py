"""Findings of the monitor, the rule that confirms and clears them, and facts about the attempt being watched."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.config.sections import MonitorConfig
from hpctrain.errors import RunFailed
from hpctrain.monitor.chief.peers import Load
from hpctrain.monitor.framing import Message
from hpctrain.run import bad_nodes
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.system.array_types import Bools, Ints

RANKS_IN_EVENT = 1000
"""Largest number of ranks listed in an event."""


class Kind(enum.StrEnum):
    """What is wrong. Only the first three blame particular ranks."""

    RANK = "rank"
    """A rank is slower than its peers in the typical step."""
    PAUSES = "pauses"
    """A rank holds up the others with long pauses in some steps."""
    HOST = "host"
    """All ranks of a host are slower than their peers."""
    MANY = "many"
    """Too many ranks are slower to say which are normal."""
    UNEVEN = "uneven"
    """Two or three ranks have differed since the start: it is unclear which of them is slow."""
    ROTATING = "rotating"
    """Pauses hit changing ranks: garbage collection, input or the system; no rank is to blame."""
    IMBALANCE = "imbalance"
    """Ranks have different amounts of work."""
    PLAN = "plan"
    """A pipeline stage or tensor index takes longer than the others on every rank that has it."""
    NETWORK = "network"
    """The exchange itself takes longer than it did."""
    GLOBAL = "global"
    """All ranks are slower than they were."""
    ABSTAIN = "abstain"
    """Marks are missing, so ranks cannot be compared."""


class FindingState(enum.StrEnum):
    """State of a finding."""

    SUSPECT = "suspect"
    CONFIRMED = "confirmed"
    CLEARED = "cleared"


@dataclass(frozen=True)
class Finding:
    """One finding about a window of steps."""

    kind: Kind
    state: FindingState
    window: int
    """Window that led to the finding."""
    ranks: tuple[int, ...] = ()
    """Ranks that the finding names."""
    hosts: tuple[str, ...] = ()
    """The hosts of those ranks."""
    cause: str = ""
    """Phase that holds the excess (data, forward, ...), gc, compute (all phases equally), mixed, or network."""
    slowdown: float = 0.0
    """Fraction by which it is slower than its peers (or than at the start)."""
    cost: float = 0.0
    """Fraction of the time that the run would save without it."""
    evidence: tuple[str, ...] = ()
    """What the host's counters show, in words."""
    place: str = ""
    """The rank's place in the grid of ``parallel``, if one rank is named; empty on a plain grid."""
    note: str = ""
    """Further remark, in words."""
    load: Load | None = None
    """The uneven stage or tensor index, for Kind.PLAN."""
    step_s: float = 0.0
    """Seconds of each step that unequal work costs, for Kind.IMBALANCE."""
    power: float | None = None
    """Power of the reported work that time follows; 0 if it follows none, None if that work does not vary."""
    has_named: bool = False
    """Another rank is named at this time: this finding concerns the other ranks."""

    def fields(self) -> dict[str, Any]:
        """Fields for an event."""
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


class Suspicion:
    """Tracks who is suspected (one bad window), confirmed (several in a row) or cleared (several calm ones in a row).

    Costs O(number observed) per window.

    Args:
        count: number of subjects tracked, such as the ranks of the run.
        confirm_after: bad windows in a row.
        clear_after: calm windows in a row.
        growth: factor on ``confirm_after`` after each clearing; above 1, what comes and goes is confirmed less often.
    """

    def __init__(self, count: int, confirm_after: int, clear_after: int, growth: int = 1) -> None:
        self.confirm_after = np.full(count, confirm_after)
        self.clear_after = clear_after
        self.growth = growth
        self.bad = np.zeros(count, dtype=np.int32)
        self.calm = np.zeros(count, dtype=np.int32)
        self.confirmed = np.zeros(count, dtype=bool)
        """[count] whether each is confirmed."""

    def observe(self, those: Ints, bad: Bools, calm: Bools) -> dict[FindingState, Ints]:
        """Adds a window; returns those whose state it changed.

        Args:
            those: [R] indexes observed; the others keep their state.
            bad: [R] bad in this window.
            calm: [R] clearly good in this window; an index may be neither.
        """
        self.bad[those] = np.where(bad, self.bad[those] + 1, 0)
        self.calm[those] = np.where(calm & ~bad, self.calm[those] + 1, 0)
        named, since = self.confirmed[those], self.bad[those]
        confirmed = those[~named & (since >= self.confirm_after[those])]
        cleared = those[named & (self.calm[those] >= self.clear_after)]
        suspected = those[~named & (since == 1) & (since < self.confirm_after[those])]
        self.confirm_after[cleared] *= self.growth
        self.confirmed[confirmed] = True
        self.confirmed[cleared] = False
        return {FindingState.CONFIRMED: confirmed, FindingState.CLEARED: cleared, FindingState.SUSPECT: suspected}


@dataclass(frozen=True)
class NodeCommand:
    """A message to one node's agent."""

    node: int
    message: Message


@dataclass
class Watched:
    """The attempt being watched: its ranks, configuration and first step, and where sentences and events go."""

    hosts: Sequence[str]
    """[N] host of each rank."""
    nodes: Sequence[int]
    """[N] node index of each rank."""
    folder: RunDir
    attempt: int
    config: MonitorConfig
    say: Callable[[str, bool], None]
    """Writes a sentence to the log; the flag is true if rank 0 may be unable to print it."""
    grid: Grid
    """Places of the ranks."""
    events: EventWriter
    first_step: int = 0
    """Step of the run at which this attempt starts, as reported by the ranks."""

    def starts_at(self, step: int) -> None:
        """Records the first step that a node's ranks report."""
        self.first_step = max(self.first_step, step)

    def exclude(self, host: str, why: str) -> bool:
        """Excludes a host from later attempts; whether it was not excluded yet. Says so if that cannot be written."""
        until = bad_nodes.in_hours(self.config.exclude_hours)
        entry = bad_nodes.BadNode(host, until, self.attempt, why, str(self.folder.path))
        try:
            return bad_nodes.exclude(bad_nodes.of_run(self.folder), entry, time.time())
        except RunFailed as error:
            self.say(f"the monitor cannot exclude {host}: {error.what}", False)
            return False

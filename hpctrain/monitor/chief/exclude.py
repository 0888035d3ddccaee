"""Whether a slow host is left out of the next start."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.monitor.chief.cause import COMPUTE
from hpctrain.monitor.chief.finding import Finding, Kind, State
from hpctrain.run.bad_nodes import BadNode, BadNodes


def exclude(nodes: BadNodes, new: BadNode, now: float) -> bool:
    """Adds a host; False if this attempt has added one already, or the host is on the list.

    Raises:
        RunFailed: the list cannot be written.
    """
    if any(entry.attempt == new.attempt or entry.node == new.node for entry in nodes.entries(now)):
        return False
    nodes.add(new)
    return True


def is_the_hosts_own(verdict: Finding, hosts: Sequence[str]) -> bool:
    """Slowness that another host would cure: confirmed, in computing, on all its ranks, seen by its counters."""
    return (
        verdict.state is State.CONFIRMED
        and verdict.kind in (Kind.RANK, Kind.HOST)
        and verdict.cause == COMPUTE
        and bool(verdict.evidence)
        and len(verdict.hosts) == 1
        and len(verdict.ranks) == list(hosts).count(verdict.hosts[0])
        and len(set(hosts)) > 1
    )

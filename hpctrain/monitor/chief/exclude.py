"""Hosts that the next requeue leaves out: a short list in the run folder, in which every entry expires."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.monitor.chief.cause import COMPUTE
from hpctrain.monitor.chief.finding import Finding, Kind, State
from hpctrain.system import safe_read
from hpctrain.system.files import write_atomically
from hpctrain.system.json_shape import fits, is_count, is_time

FILE = "excluded.json"


@dataclass(frozen=True)
class Exclusion:
    """One host that is left out."""

    host: str
    until: float
    """Unix seconds at which the entry expires."""
    attempt: int
    """The attempt that found it."""
    reason: str


def excluded(folder: Path, now: float) -> list[Exclusion]:
    """Entries of a run's monitor folder that have not expired; none where the file is missing or damaged."""
    try:
        saved = safe_read.read_json(folder / FILE)
        entries = [Exclusion(**entry) for entry in saved] if _is_list(saved) else []
    except (OSError, ValueError, TypeError):
        return []
    return [entry for entry in entries if entry.until > now]


_is_list = fits([{"host": str, "until": is_time, "attempt": is_count, "reason": str}])


def exclude(folder: Path, new: Exclusion, now: float) -> bool:
    """Adds a host; False where this attempt has added one already, or the host is on the list.

    Raises:
        RunFailed: the list cannot be written.
    """
    entries = excluded(folder, now)
    if any(entry.attempt == new.attempt or entry.host == new.host for entry in entries):
        return False
    content = json.dumps([asdict(entry) for entry in (*entries, new)], indent=2).encode() + b"\n"
    write_atomically(folder / FILE, content, folder.parent)
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

"""Lists of nodes to leave out when a run restarts, with reasons; every entry expires.

Each run has a list; a user's runs may share another one in the user's state folder. Lines are only appended, and the
last line about a node counts, so that runs can write at the same time without losing entries.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import Code
from hpctrain.run.attempts import Attempt
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, LastWord
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import safe_read
from hpctrain.system.files import append_bytes, make_private, writing
from hpctrain.system.json_shape import LATEST, is_time, maker, sound

FILE = "bad-nodes.jsonl"
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Valid host name; strict, because it goes into sbatch's command line."""


@dataclasses.dataclass(frozen=True)
class BadNode:
    """A node to leave out."""

    host: str
    until: float
    """Unix seconds at which the entry expires."""
    attempt: int
    """The attempt that found it."""
    reason: str
    run: str = ""
    """Folder of the run that found it."""

    @property
    def node(self) -> str:
        """The host name without domain, as Slurm usually names nodes; ``host`` is what the node calls itself."""
        return self.host.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class BadNodes:
    """A list of bad nodes."""

    folder: Path
    root: Path
    """``folder`` or a folder above it; symbolic links below it are not followed."""

    def entries(self, now: float) -> list[BadNode]:
        """Returns the entries that have not expired; none if the list is missing or cannot be read."""
        found: dict[str, BadNode] = {}
        try:
            lines = safe_read.read(self.folder / FILE).splitlines()
        except OSError:
            return []
        for entry in filter(None, (safe_read.parse_as(_entry_of, line) for line in lines)):
            found[entry.node] = entry
        return [entry for entry in found.values() if entry.until > now]

    def add(self, *nodes: BadNode) -> None:
        """Adds nodes or replaces their entries. Raises RunFailed if the list cannot be written."""
        lines = b"".join(json.dumps(dataclasses.asdict(node)).encode() + b"\n" for node in nodes)
        with writing(self.folder / FILE):
            if self.folder == self.root:
                make_private(self.folder)
            append_bytes(self.folder / FILE, lines, self.root)

    def clear(self, host: str, now: float) -> list[BadNode]:
        """Removes a node, or every node with ``all``; returns the removed entries. Raises as ``add`` does."""
        cleared = [entry for entry in self.entries(now) if host in ("all", entry.host, entry.node)]
        if cleared:
            self.add(*(dataclasses.replace(entry, until=0.0) for entry in cleared))
        return cleared


def exclude(nodes: BadNodes, new: BadNode, now: float) -> bool:
    """Adds a host to the list. Returns False if this attempt has already added one, or the host is listed.

    Raises:
        RunFailed: the list cannot be written.
    """
    if any(entry.attempt == new.attempt or entry.node == new.node for entry in nodes.entries(now)):
        return False
    nodes.add(new)
    return True


def in_hours(hours: float) -> float:
    """Returns the Unix time in a number of hours, which may be infinite; a list holds finite times only."""
    return min(time.time() + 3600 * hours, LATEST / 2)


def left(node: BadNode, now: float) -> str:
    """Returns how long a node stays on the list, in words."""
    return "until it is cleared" if node.until >= LATEST / 2 else f"for {(node.until - now) / 3600:.1f} h more"


def of_run(run: RunDir) -> BadNodes:
    """Returns the list of one run."""
    return BadNodes(run.monitor, run.path)


def shared() -> BadNodes:
    """Returns the list shared by this user's runs, in a folder private to the user: $XDG_STATE_HOME/hpctrain."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "hpctrain"
    return BadNodes(folder, folder)


def breaks_again(attempts: Sequence[Attempt], words: Sequence[LastWord]) -> str | None:
    """Returns the node that alone broke the last two attempts in the same way; None if there is none. Pure.

    One failure may be chance, and an error that also occurs on other nodes is the run's own. So is an exit code that a
    program chose, and the failure of the same rank twice, unless another rank of its node failed in the same way.

    Args:
        attempts: the run's attempts, oldest first; the last one has just ended.
        words: last words of that attempt's ranks.
    """
    if len(attempts) < 2 or (attempts[-1].nodes or 1) < 2 or attempts[-1].has_progressed:
        return None
    before, last = attempts[-2].verdict, attempts[-1].verdict
    if not (before and last and before.is_failure and last.is_failure and last.host):
        return None
    if (before.host, before.code) != (last.host, last.code) or _elsewhere(last, words):
        return None
    here = [word for word in words if word.host == last.host]
    chosen = any(word.error and word.error.type == "exit" and (word.exit_code or 0) < 128 for word in here)
    own = [word for word in here if word.ending in (Ending.FAILED, Ending.KILLED)]
    same_rank = last.code is not Code.NODE and before.rank == last.rank and len(own) == 1 < len(here)
    return None if chosen or same_rank else last.host


def acquitted(attempts: Sequence[Attempt]) -> str | None:
    """Returns the node of the attempt before, if its rank has now failed in the same way on another one. Pure."""
    before, last = [attempt.verdict for attempt in attempts[-2:]] if len(attempts) > 1 else (None, None)
    if not (before and last and before.is_failure and last.is_failure and last.host) or last.rank is None:
        return None
    same = (before.rank, before.code) == (last.rank, last.code) and last.code is not Code.NODE
    return before.host if same and before.host != last.host else None


def _elsewhere(verdict: RunVerdict, words: Sequence[LastWord]) -> bool:
    """Whether a rank on another host ended in the same way as a failed rank on the verdict's host."""
    own = {_how(word) for word in words if word.host == verdict.host and word.ending in (Ending.FAILED, Ending.KILLED)}
    return any(_how(word) in own for word in words if word.host != verdict.host)


def _how(word: LastWord) -> tuple[Ending, str | None]:
    return word.ending, word.error.what if word.error else word.note


def _is_host(value: object) -> bool:
    return isinstance(value, str) and HOST.fullmatch(value) is not None


_entry_of = maker(BadNode, host=sound(_is_host), until=sound(is_time))

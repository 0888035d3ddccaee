"""The attempt that is watched, and what the deciding side does about it: it tells sentences, events and nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.wire.framing import Message
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid


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

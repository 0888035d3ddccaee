"""The deciding side: takes in the nodes' reports, and has each looked at by those whom it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.chief.finding import NodeCommand, Watched
from hpctrain.monitor.chief.hang import Beat
from hpctrain.monitor.chief.standstill import OpenHang, Standstill
from hpctrain.monitor.chief.stragglers import Stragglers
from hpctrain.monitor.node.node import window_of
from hpctrain.monitor.wire.framing import Message
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid


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
        events = EventWriter(folder.monitor_events, lambda text: say(text, False))
        grid = grid or Grid(len(hosts))
        self.run = Watched(tuple(hosts), tuple(nodes), folder, attempt, config, say, grid, events)
        self.stragglers = Stragglers(self.run)
        self.standstill = Standstill(self.run)

    @property
    def nodes(self) -> Sequence[int]:
        """[N] node index of each rank."""
        return self.run.nodes

    @property
    def open_hang(self) -> OpenHang | None:
        """A hang whose stacks are awaited."""
        return self.standstill.open_hang

    def receive(self, message: Message, now: float) -> list[NodeCommand]:
        """Takes in one report."""
        fields = message.fields
        if message.kind == "window":
            return self.stragglers.add(window_of(message))
        if message.kind == "dumped":
            return self.standstill.take_stack(fields["rank"], fields["text"])
        if message.kind == "beat":
            self.run.starts_at(fields["first_step"])
            self.standstill.hear(fields["node"], [Beat(*beat) for beat in fields["beats"]], now)
            self.stragglers.hear(fields["node"], fields["dropped"], fields.get("layers", ()))
        elif message.kind == "findings":
            self.stragglers.find(fields["node"], fields["host"], fields["ranks"], now)
        return []

    def tick(self, now: float) -> list[NodeCommand]:
        """What time alone brings about."""
        self.stragglers.refresh(now)
        return self.standstill.look(now)

    def cut_off(self, node: int) -> None:
        """A node's host does not answer."""
        self.standstill.cut_off(node)

    def observer_stopped(self, begin: float, end: float) -> None:
        """The agent itself did not run between two moments, and perhaps the ranks did not either."""
        self.standstill.forgive(begin, end)

    def close(self) -> None:
        """Last view, the heat map's data, and the events that still wait."""
        self.stragglers.close()
        self.run.events.close()

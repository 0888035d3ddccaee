"""Receives the nodes' reports and passes each to the straggler or hang detection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.chief.devices import DeviceReports
from hpctrain.monitor.chief.finding import NodeCommand, Watched
from hpctrain.monitor.chief.hang import Beat
from hpctrain.monitor.chief.standstill import OpenHang, Standstill
from hpctrain.monitor.chief.stragglers import Stragglers
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node.node import window_of
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid


class Chief:
    """Decides for the whole run. Handles messages and the run folder; the agent handles sockets and processes.

    Args:
        hosts: [N] host of each rank.
        nodes: [N] node index of each rank.
        folder: the run folder.
        attempt: number of this attempt.
        config: the monitor section.
        say: writes a sentence to the log; the flag is true if rank 0 may be unable to print it.
        grid: places of the ranks; by default each rank holds the whole model.
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
        self.devices = DeviceReports(self.run)
        self.stragglers = Stragglers(self.run, self.devices.ranks)
        self.standstill = Standstill(self.run)

    @property
    def open_hang(self) -> OpenHang | None:
        """The hang whose stacks are still being collected, if any."""
        return self.standstill.open_hang

    def receive(self, message: Message, now: float) -> list[NodeCommand]:
        """Handles one report; returns commands for the nodes."""
        fields = message.fields
        if message.kind == "window":
            return self.stragglers.add(window_of(message))
        if message.kind == "dumped":
            return self.standstill.take_stack(fields["rank"], fields["text"])
        if message.kind == "beat":
            self.run.starts_at(fields["first_step"])
            self.standstill.hear(fields["node"], [Beat(*beat) for beat in fields["beats"]], now)
            self.stragglers.dropped[fields["node"]] = fields["dropped"]
        elif message.kind == "findings":
            self.stragglers.find(fields["node"], fields["host"], fields["ranks"], now)
        elif message.kind == "devices":
            self.devices.hear(fields["node"], fields["joules"], fields["ranks"], fields["broken"])
        return []

    def tick(self, now: float) -> list[NodeCommand]:
        """Does what is due at this time; returns commands for the nodes."""
        self.stragglers.refresh(now)
        self.devices.tick(now)
        return self.standstill.look(now)

    def cut_off(self, node: int) -> None:
        """Records that a node's host does not answer."""
        self.standstill.cut_off(node)

    def observer_stopped(self, begin: float, end: float) -> None:
        """Excludes a span in which the agent itself did not run: the ranks may have been stopped too."""
        self.standstill.suspensions.add(begin, end)

    def close(self) -> None:
        """Writes the last live view, the heat map and the pending events."""
        self.stragglers.close()
        self.devices.write()
        self.run.events.close()

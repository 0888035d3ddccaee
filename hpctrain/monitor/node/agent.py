"""The agent: a plain process beside a node's ranks. It reads their memory, and may die or stop without their noticing.

The first node's agent also listens to the others and decides. Started by the node's first rank (``session``), it ends
when all ranks of its node have.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.chief.chief import Chief, Command
from hpctrain.monitor.node.node import Node, NodePlan
from hpctrain.monitor.shared import PID, Layout, Reader
from hpctrain.monitor.wire import Connection, Message, connect
from hpctrain.run.folder import RunDir

POLL_S = 0.25
RECONNECT_S = 5.0
LINGER_S = 3.0
"""Longest wait at the end, for last messages."""
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Launchers and schedulers send these to every process of a job; the agent ends when the ranks do."""


@dataclass(frozen=True)
class AgentPlan:
    """What an agent is started with; JSON on its standard input."""

    node: NodePlan
    memory: int
    """Descriptor of the node's shared memory."""
    layout: Layout
    token: str
    addresses: tuple[str, ...]
    """Where the first node's agent listens."""
    port: int
    listener: int | None
    """Descriptor of the listening socket; the first node's agent only, where there are several nodes."""
    chief: dict[str, Any] | None
    """hosts, nodes, folder, attempt and config; the first node's agent only."""

    @classmethod
    def from_json(cls, text: str) -> AgentPlan:
        """The inverse of ``json.dumps(dataclasses.asdict(plan))``."""
        fields = json.loads(text)
        fields["node"] = NodePlan(**{**fields["node"], "ranks": tuple(fields["node"]["ranks"])})
        return cls(**{**fields, "layout": Layout(**fields["layout"]), "addresses": tuple(fields["addresses"])})


class Ears:
    """Waits for connections, messages and deaths."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.selector = selectors.DefaultSelector()

    def register(self, source: socket.socket | Connection) -> None:
        """Listens to a source from now on."""
        self.selector.register(source, selectors.EVENT_READ)

    def unregister(self, source: socket.socket | Connection) -> None:
        """No longer; the source may be closed already."""
        for descriptor, key in list(self.selector.get_map().items()):
            if key.fileobj is source:
                self.selector.unregister(descriptor)

    def select(self, seconds: float) -> list[socket.socket | Connection]:
        """Sources that have something, after at most so many seconds. Deaths are handed to the node."""
        for descriptor in self.node.new_lives():
            self.selector.register(descriptor, selectors.EVENT_READ, data="life")
        keys = [key for key, _ in self.selector.select(seconds)]
        for key in keys:
            if key.data == "life":
                self.node.note_death(key.fd)
                self.selector.unregister(key.fd)
                os.close(key.fd)
                self.node.alarmed = True
        return [key.fileobj for key in keys if key.data != "life"]  # type: ignore[misc]


class ChiefAgent:
    """The first node's agent: its own node, and the connections of the others."""

    def __init__(self, node: Node, chief: Chief, listener: socket.socket | None, token: bytes) -> None:
        self.node = node
        self.chief = chief
        self.listener = listener
        self.token = token
        self.connections: list[Connection] = []
        self.by_node: dict[int, Connection] = {}
        self.next_look = 0.0
        self.ears = Ears(node)

    def run(self) -> None:
        """Until the ranks of this node have ended and the other agents have said their last."""
        if self.listener is not None:
            self.listener.setblocking(False)
            self.ears.register(self.listener)
        over_since: float | None = None
        while True:
            self.turn()
            now = time.monotonic()
            if over_since is None and self.node.all_over():
                over_since = now
                self.node.alarmed = True
            if over_since is not None:
                still = self.connections or self.chief.open_hang is not None
                if not still or now - over_since > LINGER_S:
                    break
        self.turn(0)  # the first rank waits for the end of this process
        self.chief.close()

    def turn(self, patience_s: float = POLL_S) -> None:
        """Hears those who have something to say, and now and then looks at its own node. Thousands may talk."""
        for source in self.ears.select(patience_s):
            if isinstance(source, Connection):
                self.hear(source)
            else:
                self.accept()
        now = time.monotonic()
        if now < self.next_look and not self.node.alarmed:
            return
        self.next_look = now + POLL_S
        for message in self.node.poll(now):
            self.obey(self.chief.receive(message, now))
        for connection in [one for one in self.connections if one.wants_to_send]:
            self.flush(connection)
        self.obey(self.chief.tick(now))

    def hear(self, connection: Connection) -> None:
        """Takes in what another agent reports."""
        for message in connection.receive():
            if "node" in message.fields:
                self.by_node[int(message.fields["node"])] = connection
            self.obey(self.chief.receive(message, time.monotonic()))
        self.flush(connection)

    def accept(self) -> None:
        """Takes a new connection."""
        assert self.listener is not None
        with contextlib.suppress(OSError):
            stream, _ = self.listener.accept()
            connection = Connection(stream, self.token)
            self.connections.append(connection)
            self.ears.register(connection)
            self.flush(connection)

    def flush(self, connection: Connection) -> None:
        """Sends what waits. One that has ended is dropped at once: its descriptor may be the next one's."""
        connection.flush()
        if not connection.closed or connection not in self.connections:
            return
        self.connections.remove(connection)
        for key in [key for key, value in self.by_node.items() if value is connection]:
            del self.by_node[key]
        self.ears.unregister(connection)

    def obey(self, commands: list[Command]) -> None:
        """Sends commands to their nodes; this node's own last, since they may end its ranks."""
        for command in sorted(commands, key=lambda command: command.node == self.node.plan.node):
            if command.node == self.node.plan.node:
                for answer in self.node.answer(command.message):
                    self.obey(self.chief.receive(answer, time.monotonic()))
            elif command.node in self.by_node:
                connection = self.by_node[command.node]
                connection.send(command.message)
                self.flush(connection)


class NodeAgent:
    """Any other node's agent: reports, and does what it is asked to. Works on while there is no connection."""

    def __init__(self, node: Node, addresses: tuple[str, ...], port: int, token: bytes) -> None:
        self.node = node
        self.addresses = addresses
        self.port = port
        self.token = token
        self.connection: Connection | None = None
        self.next_try = 0.0
        self.ears = Ears(node)

    def run(self) -> None:
        """Until the ranks of this node have ended."""
        while not self.node.all_over():
            self.turn()
        self.node.alarmed = True
        self.turn()
        deadline = time.monotonic() + LINGER_S
        while self.connection and self.connection.wants_to_send and time.monotonic() < deadline:
            self.turn()
        if self.connection:
            self.connection.close()

    def turn(self) -> None:
        """Reports once and listens for a while."""
        now = time.monotonic()
        if self.connection is None and now >= self.next_try:
            self.next_try = now + RECONNECT_S
            self.connection = connect(list(self.addresses), self.port, self.token)
            if self.connection is not None:
                self.ears.register(self.connection)
        messages = self.node.poll(now)
        if self.connection is None:
            self.ears.select(POLL_S)
            return
        for message in messages:
            self.connection.send(Message(message.kind, {"node": self.node.plan.node, **message.fields}, message.arrays))
        self.connection.flush()
        self.ears.select(POLL_S)
        for command in self.connection.receive():
            for answer in self.node.answer(command):
                self.connection.send(answer)
            self.connection.flush()
        if self.connection.closed:
            self.ears.unregister(self.connection)
            self.connection = None


class Voice:
    """Brings sentences to the log: through the first rank, or past it where it may hang."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        os.set_blocking(sys.stdout.fileno(), False)

    def say(self, text: str, past_the_rank: bool) -> None:
        """Writes one line; a log that takes nothing loses it."""
        line = f"hpctrain monitor: {text}\n".encode()
        pid = int(self.reader.heads()[0][PID])
        with contextlib.suppress(OSError):
            if past_the_rank:
                handle = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
                os.write(handle, line)
                os.close(handle)
            else:
                os.write(sys.stdout.fileno(), line)


def give_way() -> None:
    """Low priority, on any processor of the job rather than the first rank's, and deaf to the job's signals."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def main() -> None:
    """The process."""
    give_way()
    plan = AgentPlan.from_json(sys.stdin.read())
    reader = Reader.of(plan.memory, plan.layout)
    node = Node(plan.node, reader)
    token = bytes.fromhex(plan.token)
    if plan.chief is None:
        NodeAgent(node, plan.addresses, plan.port, token).run()
        return
    folder = RunDir(Path(plan.chief["folder"]))
    config = MonitorConfig(**plan.chief["config"])
    chief = Chief(plan.chief["hosts"], plan.chief["nodes"], folder, plan.chief["attempt"], config, Voice(reader).say)
    listener = socket.socket(fileno=plan.listener) if plan.listener is not None else None
    ChiefAgent(node, chief, listener, token).run()


if __name__ == "__main__":
    main()

"""The agent: a plain process on each node. It reads its ranks' memory, and may die or stop without affecting them.

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
from hpctrain.monitor.chief.chief import Chief
from hpctrain.monitor.chief.finding import NodeCommand
from hpctrain.monitor.node import death_watch
from hpctrain.monitor.node.node import Node, NodePlan
from hpctrain.monitor.shared import PID, Layout, SlotReader
from hpctrain.monitor.wire.connection import Connection, connect
from hpctrain.monitor.wire.door import Door, DoorLimits, raise_descriptors
from hpctrain.monitor.wire.framing import Message
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid

POLL_S = 0.25
LONGEST_TURN_S = 2.0
"""An agent that takes longer between two looks was stopped, and the ranks probably too."""
RECONNECT_S = 5.0
PROOF_S = 10.0
"""Longest wait for the first node's proof; then its agent is called again."""
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
    """Descriptor of the listening socket; the first node's agent only, if there are several nodes."""
    chief: dict[str, Any] | None
    """hosts, nodes, folder, attempt, config and grid; the first node's agent only."""
    watching: int | None = None
    """Descriptor that the agent closes once no death escapes it."""

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

    def attend(self, source: socket.socket | Connection, wanted: bool = True) -> None:
        """Listens to a source from now on, or no longer. It is still open."""
        known = source.fileno() in self.selector.get_map()
        if wanted and not known:
            self.selector.register(source, selectors.EVENT_READ)
        elif known and not wanted:
            self.selector.unregister(source)

    def watch(self) -> None:
        """Listens to the lives of ranks that have joined."""
        for descriptor in self.node.new_lives():
            self.selector.register(descriptor, selectors.EVENT_READ, data="life")

    def select(self, seconds: float) -> list[socket.socket | Connection]:
        """Sources that have something, after at most ``seconds``. Reports deaths to the node."""
        self.watch()
        keys = [key for key, _ in self.selector.select(seconds)]
        for key in keys:
            if key.data == "life":
                self.selector.unregister(key.fd)
                self.node.forget_life(key.fd)
                self.node.alarm()
        return [key.fileobj for key in keys if key.data != "life"]  # type: ignore[misc]


class ChiefAgent:
    """The first node's agent: its own node, and the connections of the others.

    Args:
        node: this node.
        chief: who decides.
        door: where the other nodes' agents come in; None if there are none.
    """

    def __init__(self, node: Node, chief: Chief, door: Door | None) -> None:
        self.node = node
        self.chief = chief
        self.door = door
        self.trusted: set[Connection] = set()
        self.by_node: dict[int, Connection] = {}
        self.next_look = 0.0
        self.last_turn: float | None = None
        self.ears = Ears(node)

    def run(self) -> None:
        """Until the ranks of this node have ended and the other agents have said their last."""
        over_since: float | None = None
        while True:
            self.turn()
            now = time.monotonic()
            if over_since is None and self.node.all_over():
                over_since = now
                self.node.alarm()
            if over_since is not None:
                strangers = self.door is not None and self.door.strangers
                still = self.trusted or strangers or self.chief.open_hang is not None
                if not still or now - over_since > LINGER_S:
                    break
        self.turn(0)  # the first rank waits for the end of this process
        self.chief.close()

    def turn(self, patience_s: float = POLL_S) -> None:
        """Hears those who have something to say, and now and then looks at its own node. Thousands may talk."""
        if self.door is not None:
            self.keep_door(self.door, time.monotonic())
        for source in self.ears.select(patience_s):
            if isinstance(source, Connection):
                self.hear(source)
            elif self.door is not None:
                for stranger in self.door.accept(time.monotonic(), len(self.trusted)):
                    self.ears.attend(stranger)
                    self.flush(stranger)
        now = time.monotonic()
        if self.last_turn is not None and now - self.last_turn > LONGEST_TURN_S:
            self.chief.observer_stopped(self.last_turn, now)
        self.last_turn = now
        if now < self.next_look and not self.node.alarmed:
            return
        self.next_look = now + POLL_S
        for message in self.node.poll(now):
            self.obey(self.chief.receive(message, now))
        for connection in [one for one in self.trusted if one.wants_to_send]:
            self.flush(connection)
        self.obey(self.chief.tick(now))

    def keep_door(self, door: Door, now: float) -> None:
        """Sends away strangers who have had their time, and lets others wait outside while there is no room."""
        for stranger in door.overdue(now):
            self.part_from(stranger)
        self.ears.attend(door.listener, door.has_room(now, len(self.trusted)))

    def hear(self, connection: Connection) -> None:
        """Takes in what another agent reports."""
        messages = connection.receive()
        if connection.trusted and connection not in self.trusted:
            self.trusted.add(connection)
            if self.door is not None:
                self.door.forget(connection)
        for message in messages:
            self.introduce(int(message.fields["node"]), connection)
            self.obey(self.chief.receive(message, time.monotonic()))
        self.flush(connection)

    def introduce(self, node: int, connection: Connection) -> None:
        """Remembers whose connection it is; an agent that connects again has lost its first one."""
        known = self.by_node.get(node)
        if known is not None and known is not connection:
            self.part_from(known)
        self.by_node[node] = connection

    def flush(self, connection: Connection) -> None:
        """Sends what waits; parts from one that has ended."""
        connection.flush()
        if connection.ended:
            self.part_from(connection)

    def part_from(self, connection: Connection) -> None:
        """Closes a connection. Nothing happens if it is closed already."""
        if connection.fileno() < 0:
            return
        self.ears.attend(connection, wanted=False)
        self.trusted.discard(connection)
        if self.door is not None:
            self.door.forget(connection)
        for node in [node for node, known in self.by_node.items() if known is connection]:
            del self.by_node[node]
            if connection.unreachable:
                self.chief.cut_off(node)
        connection.close()

    def obey(self, commands: list[NodeCommand]) -> None:
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
        self.node.alarm()
        self.turn()
        deadline = time.monotonic() + LINGER_S
        while self.connection and self.connection.has_unsent and time.monotonic() < deadline:
            self.turn()
        if self.connection:
            self.connection.close()

    def turn(self) -> None:
        """Reports once and listens for a while."""
        now = time.monotonic()
        if self.connection is None and now >= self.next_try:
            self.next_try = now + RECONNECT_S
            self.connection = connect(list(self.addresses), self.port, self.token, now)
            if self.connection is not None:
                self.ears.attend(self.connection)
        messages = self.node.poll(now)
        if self.connection is None:
            self.ears.select(POLL_S)
            return
        for message in messages:
            self.report(self.connection, message)
        self.connection.flush()
        self.ears.select(POLL_S)
        for command in self.connection.receive():
            for answer in self.node.answer(command):
                self.report(self.connection, answer)
        self.connection.flush()
        silent = not self.connection.trusted and now - self.connection.opened > PROOF_S
        if self.connection.ended or silent:
            self.ears.attend(self.connection, wanted=False)
            self.connection.close()
            self.connection = None

    def report(self, connection: Connection, message: Message) -> None:
        """Queues a message with this node's number."""
        connection.send(Message(message.kind, {"node": self.node.plan.node, **message.fields}, message.arrays))


class Voice:
    """Brings sentences to the log: through the first rank, or past it if it may hang."""

    def __init__(self, reader: SlotReader) -> None:
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


def stand_apart() -> None:
    """On any processor of the job rather than the first rank's, and deaf to the job's signals."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def make_agent(plan: AgentPlan, descriptors: int) -> ChiefAgent | NodeAgent:
    """The agent that this process is; it may have this many open files."""
    reader = SlotReader.of(plan.memory, plan.layout)
    node = Node(plan.node, reader)
    token = bytes.fromhex(plan.token)
    if plan.chief is None:
        return NodeAgent(node, plan.addresses, plan.port, token)
    folder = RunDir(Path(plan.chief["folder"]))
    config = MonitorConfig(**plan.chief["config"])
    voice = Voice(reader)
    grid = Grid(**plan.chief["grid"])
    chief = Chief(plan.chief["hosts"], plan.chief["nodes"], folder, plan.chief["attempt"], config, voice.say, grid)
    door = None
    if plan.listener is not None:
        limits = DoorLimits()
        most = descriptors - limits.reserved_descriptors
        if len(set(chief.nodes)) > most:
            voice.say(f"watches {most} nodes only: more than {descriptors} open files are not permitted here", False)
        door = Door(socket.socket(fileno=plan.listener), token, descriptors, limits)
    return ChiefAgent(node, chief, door)


def main() -> None:
    """The process."""
    stand_apart()
    plan = AgentPlan.from_json(sys.stdin.read())
    agent = make_agent(plan, raise_descriptors())
    agent.ears.watch()
    death_watch.start(agent.node)
    if plan.watching is not None:
        os.close(plan.watching)
    with contextlib.suppress(OSError):
        os.nice(10)  # from here on, since the ranks have waited for it
    agent.run()


if __name__ == "__main__":
    main()

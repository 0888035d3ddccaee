"""The agent: a separate process on each node that reads its ranks' shared memory. Its death does not affect them.

The first node's agent also receives the others' reports and decides. The node's first rank starts it (``session``);
it ends when all ranks of its node have ended.
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
from hpctrain.monitor.connection import Connection, Door, DoorLimits, connect, raise_descriptors
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node import death_watch
from hpctrain.monitor.node.node import Node, NodePlan
from hpctrain.monitor.shared import PID, RingLayout, SlotReader
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.system.channel import GREETING_S
from hpctrain.system.json_shape import maker, sound

POLL_S = 0.25
LONGEST_TURN_S = 2.0
"""An agent with a longer gap between two turns was stopped, and probably the ranks were too."""
RECONNECT_S = 5.0
LINGER_S = 3.0
"""Longest wait for last messages at the end."""
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the agent ignores: launchers send them to every process of a job, but it must outlive the ranks."""


@dataclass(frozen=True)
class AgentPlan:
    """Parameters of an agent, passed as JSON on its standard input."""

    node: NodePlan
    memory: int
    """Descriptor of the node's shared memory."""
    layout: RingLayout
    token: str
    addresses: tuple[str, ...]
    """Addresses at which the first node's agent listens."""
    port: int
    listener: int | None
    """Descriptor of the listening socket; only for the first node's agent, if there are several nodes."""
    chief: dict[str, Any] | None
    """hosts, nodes, folder, attempt, config and grid; only for the first node's agent."""
    watching: int | None = None
    """Descriptor that the agent closes once it notices every death."""


plan_of = maker(AgentPlan, chief=sound(dict))
"""The inverse of ``dataclasses.asdict``."""


class Inputs:
    """Waits for connections, messages and deaths."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.selector = selectors.DefaultSelector()

    def attend(self, source: socket.socket | Connection, wanted: bool = True) -> None:
        """Starts or stops listening to a source, which must be open."""
        known = source.fileno() in self.selector.get_map()
        if wanted and not known:
            self.selector.register(source, selectors.EVENT_READ)
        elif known and not wanted:
            self.selector.unregister(source)

    def watch(self) -> None:
        """Starts to watch for the deaths of ranks that have joined."""
        for descriptor in self.node.new_lives():
            self.selector.register(descriptor, selectors.EVENT_READ, data="life")

    def select(self, seconds: float) -> list[socket.socket | Connection]:
        """Waits at most ``seconds`` and returns the readable sources. Reports deaths to the node."""
        self.watch()
        keys = [key for key, _ in self.selector.select(seconds)]
        for key in keys:
            if key.data == "life":
                self.selector.unregister(key.fd)
                self.node.forget_life(key.fd)
                self.node.alarm()
        return [key.fileobj for key in keys if key.data != "life"]  # type: ignore[misc]


class ChiefAgent:
    """The first node's agent: watches its own node and serves the other agents' connections.

    Args:
        node: this node.
        chief: decides for the run.
        door: accepts the other nodes' agents; None if there are none.
    """

    def __init__(self, node: Node, chief: Chief, door: Door | None) -> None:
        self.node = node
        self.chief = chief
        self.door = door
        self.trusted: set[Connection] = set()
        self.by_node: dict[int, Connection] = {}
        self.next_look = 0.0
        self.last_turn: float | None = None
        self.inputs = Inputs(node)

    def run(self) -> None:
        """Runs until the ranks of this node have ended and the other agents have disconnected."""
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

    def turn(self, timeout_s: float = POLL_S) -> None:
        """Handles readable connections, of which there may be thousands, and polls its own node when due."""
        if self.door is not None:
            self.keep_door(self.door, time.monotonic())
        for source in self.inputs.select(timeout_s):
            if isinstance(source, Connection):
                self.hear(source)
            elif self.door is not None:
                for stranger in self.door.accept(time.monotonic(), len(self.trusted)):
                    self.inputs.attend(stranger)
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
        """Closes unauthenticated connections that are overdue; stops accepting while there is no room."""
        for stranger in door.overdue(now):
            self.disconnect(stranger)
        self.inputs.attend(door.listener, door.has_room(now, len(self.trusted)))

    def hear(self, connection: Connection) -> None:
        """Handles another agent's messages."""
        if connection.ended:  # its agent has just connected again
            return
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
        """Records the node of a connection; an agent that connects again has lost its earlier connection."""
        known = self.by_node.get(node)
        if known is not None and known is not connection:
            self.disconnect(known)
        self.by_node[node] = connection

    def flush(self, connection: Connection) -> None:
        """Sends queued data; closes the connection if it has ended."""
        connection.flush()
        if connection.ended:
            self.disconnect(connection)

    def disconnect(self, connection: Connection) -> None:
        """Closes a connection, unless it is already closed."""
        if connection.fileno() < 0:
            return
        self.inputs.attend(connection, wanted=False)
        self.trusted.discard(connection)
        if self.door is not None:
            self.door.forget(connection)
        for node in [node for node, known in self.by_node.items() if known is connection]:
            del self.by_node[node]
            if connection.unreachable:
                self.chief.cut_off(node)
        connection.close()

    def obey(self, commands: list[NodeCommand]) -> None:
        """Sends commands to their nodes, this node's own last, since they may end its ranks."""
        for command in sorted(commands, key=lambda command: command.node == self.node.plan.node):
            if command.node == self.node.plan.node:
                for answer in self.node.answer(command.message):
                    self.obey(self.chief.receive(answer, time.monotonic()))
            elif command.node in self.by_node:
                connection = self.by_node[command.node]
                connection.send(command.message)
                self.flush(connection)


class NodeAgent:
    """Any other node's agent: reports and executes commands. Continues without a connection."""

    def __init__(self, node: Node, addresses: tuple[str, ...], port: int, token: bytes) -> None:
        self.node = node
        self.addresses = addresses
        self.port = port
        self.token = token
        self.connection: Connection | None = None
        self.next_try = 0.0
        self.inputs = Inputs(node)

    def run(self) -> None:
        """Runs until the ranks of this node have ended."""
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
        """Reports once, then listens for up to POLL_S."""
        now = time.monotonic()
        if self.connection is None and now >= self.next_try:
            self.next_try = now + RECONNECT_S
            self.connection = connect(list(self.addresses), self.port, self.token, now)
            if self.connection is not None:
                self.inputs.attend(self.connection)
        messages = self.node.poll(now)
        if self.connection is None:
            self.inputs.select(POLL_S)
            return
        for message in messages:
            self.report(self.connection, message)
        self.connection.flush()
        self.inputs.select(POLL_S)
        for command in self.connection.receive():
            for answer in self.node.answer(command):
                self.report(self.connection, answer)
        self.connection.flush()
        silent = not self.connection.trusted and now - self.connection.opened > GREETING_S
        if self.connection.ended or silent:
            self.inputs.attend(self.connection, wanted=False)
            self.connection.close()
            self.connection = None

    def report(self, connection: Connection, message: Message) -> None:
        """Queues a message with this node's number."""
        connection.send(Message(message.kind, {"node": self.node.plan.node, **message.fields}, message.arrays))


class LogWriter:
    """Writes sentences to the log: through the first rank, or directly to its stdout if the rank may hang."""

    def __init__(self, reader: SlotReader) -> None:
        self.reader = reader
        os.set_blocking(sys.stdout.fileno(), False)

    def say(self, text: str, past_the_rank: bool) -> None:
        """Writes one line; the line is lost if the log does not accept it."""
        line = f"hpctrain monitor: {text}\n".encode()
        pid = int(self.reader.heads()[0][PID])
        with contextlib.suppress(OSError):
            if past_the_rank:
                handle = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
                os.write(handle, line)
                os.close(handle)
            else:
                os.write(sys.stdout.fileno(), line)


def detach() -> None:
    """Ignores the job's signals and undoes the first rank's CPU affinity."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def make_agent(plan: AgentPlan, descriptors: int) -> ChiefAgent | NodeAgent:
    """Makes this process's agent. ``descriptors`` is its limit of open files."""
    reader = SlotReader.of(plan.memory, plan.layout)
    node = Node(plan.node, reader)
    token = bytes.fromhex(plan.token)
    if plan.chief is None:
        return NodeAgent(node, plan.addresses, plan.port, token)
    folder = RunDir(Path(plan.chief["folder"]))
    config = MonitorConfig(**plan.chief["config"])
    log = LogWriter(reader)
    grid = Grid(**plan.chief["grid"])
    chief = Chief(plan.chief["hosts"], plan.chief["nodes"], folder, plan.chief["attempt"], config, log.say, grid)
    door = None
    if plan.listener is not None:
        limits = DoorLimits()
        most = descriptors - limits.reserved_descriptors
        if len(set(chief.run.nodes)) > most:
            log.say(f"watches {most} nodes only: more than {descriptors} open files are not permitted here", False)
        door = Door(socket.socket(fileno=plan.listener), token, descriptors, limits)
    return ChiefAgent(node, chief, door)


def main() -> None:
    """Runs the agent."""
    detach()
    plan = plan_of(json.load(sys.stdin))
    agent = make_agent(plan, raise_descriptors())
    agent.inputs.watch()
    death_watch.start(agent.node)
    if plan.watching is not None:
        os.close(plan.watching)
    with contextlib.suppress(OSError):
        os.nice(10)  # only now, since the ranks waited for the start
    agent.run()


if __name__ == "__main__":
    main()

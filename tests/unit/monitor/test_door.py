"""Intruders on the network: they cost little, keep nobody out, and are never taken for a death. Scripts of attacks.

``make torture`` runs them with more intruders (HPCTRAIN_INTRUDERS).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpctrain.monitor import shared
from hpctrain.monitor.chief.hang import Beat, HangWatch
from hpctrain.monitor.connection import Connection, Door, DoorLimits, connect, listen, new_hello
from hpctrain.monitor.node.node import Node, NodePlan
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.monitor.shared import PID, STARTED, RingLayout, Slot, SlotReader
from hpctrain.system import processes
from hpctrain.system.address import LOOPBACK, Interface, is_fast, meeting_address

INTRUDERS = int(os.environ.get("HPCTRAIN_INTRUDERS", "300"))
TOKEN = b"t" * 32


class Keeper:
    """A door, kept as the first node's agent keeps it, in made-up time."""

    def __init__(self, limits: DoorLimits, descriptors: int = 4096) -> None:
        self.door = Door(listen(LOOPBACK), TOKEN, descriptors, limits)
        self.trusted: list[Connection] = []
        self.now = 0.0

    @property
    def port(self) -> int:
        return int(self.door.listener.getsockname()[1])

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for late in self.door.overdue(self.now):
            self.door.forget(late)
            late.close()
        for stranger in [*self.door.accept(self.now, len(self.trusted)), *list(self.door.strangers)]:
            stranger.flush()
            stranger.receive()
            stranger.flush()
            if stranger.trusted and stranger not in self.trusted:
                self.trusted.append(stranger)
            if stranger.trusted or stranger.ended:
                self.door.forget(stranger)
            if stranger.ended:
                stranger.close()

    def close(self) -> None:
        for connection in [*self.trusted, *self.door.strangers]:
            connection.close()
        self.door.listener.close()


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process, which plays all intruders, needs more descriptors than the one it attacks."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing more can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def keeping(limits: DoorLimits, descriptors: int = 4096) -> Iterator[Keeper]:
    keeper = Keeper(limits, descriptors)
    try:
        yield keeper
    finally:
        keeper.close()


@contextlib.contextmanager
def idle(port: int, number: int, says: bytes = b"", source: str = LOOPBACK) -> Iterator[list[socket.socket]]:
    """Connections that never prove anything."""
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(number):
            stream = stack.enter_context(socket.create_connection((LOOPBACK, port), 5, (source, 0)))
            stream.sendall(says)
            streams.append(stream)
        yield streams


def agent_gets_in(keeper: Keeper, seconds_a_turn: float = 0.01) -> bool:
    agent = connect([LOOPBACK], keeper.port, TOKEN, keeper.now)
    assert agent is not None
    for _ in range(400):
        agent.flush()
        keeper.turn(seconds_a_turn)
        agent.receive()
        if agent.trusted or agent.ended:
            break
    agent.close()
    return agent.trusted


@pytest.mark.parametrize("says", [b"", b"h", new_hello()], ids=["nothing", "a byte", "a hello"])
def test_idle_connections_are_few_and_keep_nobody_out(many_files, says):
    with keeping(DoorLimits()) as keeper:
        with contextlib.ExitStack() as stack:
            for _ in range(INTRUDERS // 50):
                stack.enter_context(idle(keeper.port, 50, says))
                keeper.turn(0.01)
            keeper.turn()
            assert len(keeper.door.strangers) <= DoorLimits().strangers_of_address
            assert agent_gets_in(keeper)
        keeper.turn(DoorLimits().patience_s + 1)
        keeper.turn()
        assert not keeper.door.strangers


def test_intruders_of_many_addresses_wait_outside_and_not_for_long(many_files):
    limits = DoorLimits(strangers=40, strangers_of_address=16)
    with keeping(limits) as keeper, contextlib.ExitStack() as stack:
        for address in range(2, 8):
            stack.enter_context(idle(keeper.port, 16, source=f"127.0.0.{address}"))
        keeper.turn()
        assert len(keeper.door.strangers) == 40 and not keeper.door.has_room(keeper.now, 0)
        assert agent_gets_in(keeper, limits.hurry_s / 10)


def test_who_proves_nothing_is_sent_away_in_time():
    limits = DoorLimits(patience_s=10)
    with keeping(limits) as keeper, idle(keeper.port, 3, new_hello()) as streams:
        keeper.turn()
        assert len(keeper.door.strangers) == 3
        keeper.turn(9.9)
        assert len(keeper.door.strangers) == 3
        keeper.turn(0.2)
        assert not keeper.door.strangers
        for stream in streams:
            assert b"" in (stream.recv(4096), stream.recv(4096), stream.recv(4096))


def test_connections_leave_descriptors_for_looking():
    limits = DoorLimits(reserved_descriptors=100)
    with keeping(limits, descriptors=105) as keeper, idle(keeper.port, 12):
        keeper.turn()
        assert len(keeper.door.strangers) == 5


def test_without_descriptors_the_door_rests_and_opens_again():
    with keeping(DoorLimits()) as keeper, idle(keeper.port, 1):
        with no_descriptors():
            assert keeper.door.accept(0.0, 0) == []
        assert not keeper.door.has_room(0.5, 0) and keeper.door.has_room(1.5, 0)
        assert len(keeper.door.accept(1.5, 0)) == 1


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-Ic", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_a_look_tells_the_dead_from_those_that_cannot_be_seen(child):
    with no_descriptors():
        assert processes.look(child.pid, 1.0) == processes.UNSEEN
    child.kill()
    child.wait()
    assert processes.look(child.pid, 1.0) == processes.GONE


def test_a_look_knows_a_number_that_another_process_has_now(child):
    born = processes.birth(child.pid)
    assert processes.look(child.pid, born) in "RSD"
    assert processes.look(child.pid, born + 1) == processes.GONE
    assert processes.look(child.pid, 0.0) in "RSD", "its start is not known"


def test_an_observer_that_cannot_look_reports_no_death():
    layout = RingLayout(2, 64)
    handle, path = shared.create(layout)
    os.unlink(path)
    slots = [Slot(shared.map_memory(handle, layout), layout, rank) for rank in range(2)]
    for slot in slots:
        slot.join()
        RingClock(slot)
    node = Node(NodePlan(0, (0, 1), 32, 1.0), SlotReader.of(handle, layout))
    os.close(handle)
    watch, now = HangWatch(None), time.monotonic()
    with no_descriptors():
        assert node.new_lives() == []
        for seconds in (0, 2, 4):
            beats = beats_of(node, now + seconds)
            assert [beat.state for beat in beats] == [processes.UNSEEN] * 2
            assert watch.observe(beats) is None and not node.all_over()
    slots[1].head[PID], slots[1].head[STARTED] = 2**22 + 1, 5.0  # a number that no process has
    hang = watch.observe(beats_of(node, now + 6))
    assert hang is not None and hang.died and [beat.rank for beat in hang.culprits] == [1]


def beats_of(node: Node, now: float) -> list[Beat]:
    [message] = [message for message in node.poll(now) if message.kind == "beat"]
    return [Beat(*beat) for beat in message.fields["beats"]]


def network(address: str, speed: int = 0, prefix: int = 24) -> Interface:
    return Interface(address, f"{address.rpartition('.')[0]}.0/{prefix}", speed)


OWN = [network("10.0.1.1", 1000), network("192.168.7.1", 100_000), network("172.17.0.1", 10_000)]


@pytest.mark.parametrize(
    ("others", "address"),
    [
        ([["10.0.1.2", "192.168.7.2", "172.17.0.1"]], "192.168.7.1"),
        ([["10.0.1.2", "192.168.7.2"], ["10.0.1.3"]], "10.0.1.1"),
        ([["172.17.0.1", "10.9.9.9"]], None),
        ([["10.0.1.1", "192.168.7.1", "172.17.0.1"]], LOOPBACK),
        ([[]], None),
    ],
    ids=["the fastest", "all hosts are on it", "a bridge of the same number is none", "the same host", "unknown"],
)
def test_the_first_node_listens_on_the_jobs_network_only(others, address):
    assert meeting_address(OWN, others) == address


def test_a_fast_network_comes_before_ethernet_whatever_its_speed(tmp_path):
    slow, infiniband = network("10.0.1.1", 100_000), dataclasses.replace(network("10.4.0.1"), fast=True)
    assert meeting_address([slow, infiniband], [["10.0.1.2", "10.4.0.2"]]) == "10.4.0.1"
    for name, kind in (("ib0", "32"), ("eth0", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    assert [is_fast(name, tmp_path) for name in ("ib0", "eth0", "hsn0", "gone")] == [True, False, True, False]


def test_a_listener_is_bound_to_its_address():
    with listen(LOOPBACK) as listener:
        assert listener.getsockname()[0] == LOOPBACK


def test_an_agent_takes_nothing_for_the_first_nodes_that_is_not():
    with listen(LOOPBACK) as false_chief:
        agent = connect([LOOPBACK], false_chief.getsockname()[1], TOKEN, 0.0)
        assert agent is not None
        false_chief.setblocking(True)
        stream, _ = false_chief.accept()
        stream.sendall(new_hello() + secrets.token_bytes(32))
        while not agent.ended:
            agent.flush()
            assert agent.receive() == []
        agent.close()
        stream.close()

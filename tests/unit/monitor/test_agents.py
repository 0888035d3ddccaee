"""Two agents as processes, as on two nodes: real sockets and shared memory; the ranks' clocks are driven from here."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpctrain.comm.world import alone
from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor import rank_monitor, shared
from hpctrain.monitor.chief.finding import NodeCommand
from hpctrain.monitor.connection import Door, DoorLimits, connect, listen
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node import death_watch
from hpctrain.monitor.node.agent import AgentPlan, ChiefAgent, Inputs
from hpctrain.monitor.node.node import Node as NodeView
from hpctrain.monitor.node.node import NodePlan
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.monitor.shared import FINISHED, PID, STARTED, STATE, RingLayout, Slot, SlotReader
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import noted_deaths
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.system import processes
from hpctrain.system.address import LOOPBACK
from hpctrain.train.clock import Phase
from tests.support.command import wait_for
from tests.support.mpi import PATIENCE_S

RANKS_PER_NODE = 4
INTRUDERS = int(os.environ.get("HPCTRAIN_INTRUDERS", "300"))
LAYOUT = RingLayout(ranks=RANKS_PER_NODE, rows=1024)


class Node:
    """The memory and the agent of a node whose ranks are clocks of this process."""

    def __init__(self, index: int, folder: Path, token: str, listener: socket.socket | None, port: int) -> None:
        self.port = port
        handle, path = shared.create(LAYOUT)
        os.unlink(path)
        memory = shared.map_memory(handle, LAYOUT)
        self.clocks = []
        for local_rank in range(RANKS_PER_NODE):
            slot = Slot(memory, LAYOUT, local_rank)
            slot.join()
            self.clocks.append(RingClock(slot))
        ranks = range(index * RANKS_PER_NODE, (index + 1) * RANKS_PER_NODE)
        chief = None
        if index == 0:
            names = [f"n{node}" for node in range(2) for _ in range(RANKS_PER_NODE)]
            nodes = [node for node in range(2) for _ in range(RANKS_PER_NODE)]
            config = asdict(MonitorConfig(window_steps=16, hang_s=600, on_hang="report"))
            chief = {"hosts": names, "nodes": nodes, "folder": str(folder), "attempt": 1, "config": config}
            chief["grid"] = {"ranks": len(names)}
        self.watched, watching = os.pipe()
        plan = AgentPlan(
            node=NodePlan(index, tuple(ranks), 16, 1.0),
            memory=handle,
            layout=LAYOUT,
            token=token,
            addresses=(LOOPBACK,),
            port=port,
            listener=listener.fileno() if listener else None,
            chief=chief,
            watching=watching,
        )
        keep = [handle, watching] + ([listener.fileno()] if listener else [])
        self.agent: subprocess.Popen[bytes] = rank_monitor.spawn(plan, keep, RunDir(folder))
        os.close(handle)
        os.close(watching)

    def end(self) -> None:
        for clock in self.clocks:
            clock.head[STATE] = FINISHED


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    (tmp_path / "monitor").mkdir()
    token = secrets.token_hex(32)
    with listen(LOOPBACK) as listener:
        port = listener.getsockname()[1]
        pair = [Node(0, tmp_path, token, listener, port), Node(1, tmp_path, token, None, port)]
    for node in pair:
        assert select.select([node.watched], [], [], 60)[0], "the agent watches: what it does not see would be lost"
        os.close(node.watched)
    yield pair
    for node in pair:
        node.agent.kill()
        node.agent.wait()
        if node.agent.stdout:
            node.agent.stdout.close()


def drive(nodes: list[Node], steps: int, slow: int, extra_s: float, first: int = 0) -> None:
    """Synchronous steps in made-up time: the slow rank takes longer to read, the others wait for it."""
    clocks = [clock for node in nodes for clock in node.clocks]
    for step in range(first, first + steps):
        for rank, clock in enumerate(clocks):
            behind = extra_s if rank == slow and step >= 100 else 0.0
            noise = 1 + 0.01 * ((7 * step + 3 * rank) % 5)
            for phase, seconds in (
                (Phase.DATA, 0.01 * noise + behind),
                (Phase.BACKWARD, 0.1 * noise),
                (Phase.EXCHANGE, 0.02 + extra_s - behind),
            ):
                clock.totals[phase] += seconds
            clock.end_step(1.0)
        time.sleep(0.002)  # the agents look four times a second; the ring must not run ahead of them


@pytest.mark.slow
def test_the_first_node_judges_what_the_other_reports(nodes, tmp_path):
    drive(nodes, 400, slow=5, extra_s=0.03)
    wait_for("verdict", (tmp_path / "monitor" / "events.jsonl").exists)
    for node in nodes:
        node.end()
    for node in nodes:
        assert node.agent.wait(PATIENCE_S) == 0
    events = [json.loads(line) for line in (tmp_path / "monitor" / "events.jsonl").read_text().splitlines()]
    assert [(event["rank"], event["host"], event["cause"]) for event in events] == [(5, "n1", "data")]
    view = json.loads((tmp_path / "monitor" / "live.json").read_text())
    assert view["step"] == 400 and view["dropped_windows"] == 0
    for index in range(2):
        assert (tmp_path / "monitor" / f"agent-{index}.log").read_text() == ""


@pytest.mark.slow
def test_intruders_neither_blind_nor_end_a_healthy_run(nodes, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.ExitStack() as stack:
            for number in range(INTRUDERS):
                stream = stack.enter_context(socket.create_connection((LOOPBACK, nodes[0].port), PATIENCE_S))
                if number % 100 == 0:
                    with contextlib.suppress(OSError):
                        stream.sendall(struct.pack("!I", 2**24) + b"[" * 2**20)
            verdicts, steps = tmp_path / "monitor" / "events.jsonl", itertools.count(0, 100)
            # The other node's agent may be shut out at first, as long as intruders come from its address.
            wait_for("verdict", lambda: drive(nodes, 100, 5, 0.03, next(steps)) or verdicts.exists())
            assert len(os.listdir(f"/proc/{nodes[0].agent.pid}/fd")) < 100
            for node in nodes:
                node.end()
            assert [node.agent.wait(PATIENCE_S) for node in nodes] == [0, 0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    events = [json.loads(line) for line in (tmp_path / "monitor" / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["rank"]) for event in events] == [("straggler", 5)]


def test_a_connection_that_breaks_while_the_first_node_sends_can_come_again():
    node = SimpleNamespace(plan=SimpleNamespace(node=0), alarmed=False, new_lives=lambda: [], poll=lambda now: [])
    chief = SimpleNamespace(receive=lambda message, now: [], tick=lambda now: [], open_hang=None)
    with listen(LOOPBACK) as listener:
        first = ChiefAgent(node, chief, Door(listener, b"t", 1024, DoorLimits()))  # type: ignore[arg-type]

        def meet():
            other = connect([LOOPBACK], listener.getsockname()[1], b"t", 0.0)
            assert other is not None
            other.send(Message("beat", {"node": 1}))
            for _ in range(6):
                other.flush()
                first.turn()
                other.receive()
            return other

        other = meet()
        former = first.by_node[1]
        other.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        other.stream.close()
        first.obey([NodeCommand(1, Message("look"))])
        other = meet()
        first.hear(former)  # it was readable in the same turn in which the node came again
        assert other.trusted and first.trusted == {first.by_node[1]}
        other.close()
        first.by_node[1].close()
        first.inputs.selector.close()


def test_a_folder_that_cannot_be_written_costs_the_monitor_only(tmp_path, capsys):
    (tmp_path / "run").touch()
    with rank_monitor.start(alone(), tmp_path / "run") as monitor:
        assert monitor.agent is None
        monitor.clock.end_step()
    assert "not watching this run" in capsys.readouterr().err


def test_nothing_of_the_monitor_outlives_a_run_in_a_process_that_goes_on(tmp_path):
    with rank_monitor.start(alone(), tmp_path) as monitor:
        assert monitor.agent is not None
        started = wait_for("process that notes deaths", psutil.Process(monitor.agent.pid).children)
        assert len(started) == 1
    wait_for("end of what the agent has started", lambda: not any(map(runs, started)))


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_rank_with_thousands_of_open_files_awaits_its_agent(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(Path(os.devnull).open()).fileno() <= 1024:
            pass
        monitor = stack.enter_context(rank_monitor.start(alone(), tmp_path))
        assert monitor.watching > 1024
        monitor.await_agent()


@pytest.mark.slow
def test_the_other_node_lives_on_without_the_first(nodes):
    drive(nodes, 40, slow=0, extra_s=0.0)
    nodes[0].agent.kill()
    drive(nodes, 100, slow=0, extra_s=0.0)
    assert nodes[1].agent.poll() is None
    nodes[1].end()
    assert nodes[1].agent.wait(PATIENCE_S) == 0


def test_a_python_that_knows_no_pidfds_watches_all_the_same(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    layout = RingLayout(1, 1024)
    handle, path = shared.create(layout)
    os.unlink(path)
    slot = Slot(shared.map_memory(handle, layout), layout, 0)
    slot.join()
    RingClock(slot)
    node = NodeView(NodePlan(0, (0,), 32, 5.0), SlotReader.of(handle, layout))
    assert Inputs(node).select(0) == []
    assert [message.kind for message in node.poll(time.monotonic())] == ["beat"]


@pytest.mark.parametrize("has_died", [False, True])
def test_who_notes_deaths_outlives_the_others_if_there_is_one_to_note(monkeypatch, has_died):
    layout = RingLayout(ranks=2, rows=16)
    handle, path = shared.create(layout)
    os.unlink(path)
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    with subprocess.Popen(["sleep", "600"]) as watch:
        for local, rank in enumerate(ranks):
            slot = Slot(shared.map_memory(handle, layout), layout, local)
            slot.join()
            slot.head[PID], slot.head[STARTED] = rank.pid, processes.birth(rank.pid)
        if has_died:
            ranks[1].kill()
            wait_for("its end", lambda: processes.look(ranks[1].pid, 0) == "Z")  # not reaped, as while threads end
        families = {os.getpid(): [watch.pid], ranks[0].pid: [os.getpid(), watch.pid]}
        monkeypatch.setattr("hpctrain.monitor.node.node.family", lambda pid: families.get(pid, []))
        NodeView(NodePlan(0, (0, 1), 32, 5.0), SlotReader.of(handle, layout)).kill()
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [-signal.SIGKILL] * 2
        watch.terminate()
        assert watch.wait(PATIENCE_S) == -(signal.SIGTERM if has_died else signal.SIGKILL)
    os.close(handle)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_of_ranks_that_end_together_the_one_that_no_launcher_has_ended_is_noted_first(monkeypatch, killed, first):
    ranks, noted = [subprocess.Popen(["sleep", "600"]) for _ in range(2)], []
    lives, (agent, still_there) = {rank.pid: os.pidfd_open(rank.pid) for rank in ranks}, os.pipe()
    for number in (first, 1 - first):
        ranks[number].send_signal(signal.SIGKILL if number == killed else signal.SIGTERM)
        wait_for("its end", lambda number=number: processes.look(ranks[number].pid, 0) == "Z")
    monkeypatch.setattr("hpctrain.monitor.node.death_watch.os.listdir", lambda folder: [])
    monkeypatch.setattr("hpctrain.monitor.node.death_watch.note", lambda node, *death: noted.append(death))
    death_watch.watch(SimpleNamespace(lives=lives), agent)  # type: ignore[arg-type]
    assert noted == [(ranks[killed].pid, -signal.SIGKILL, False), (ranks[1 - killed].pid, -signal.SIGTERM, False)]
    for rank in ranks:
        rank.wait()
    for descriptor in (*lives.values(), agent, still_there):
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
@pytest.mark.parametrize("reaped", [False, True])
def test_a_death_is_noted_as_alone_if_the_other_ranks_and_the_agent_live_then(monkeypatch, reaped):
    ranks, noted = [subprocess.Popen(["sleep", "600"]) for _ in range(3)], []
    lives, (agent, still_there) = {rank.pid: os.pidfd_open(rank.pid) for rank in ranks}, os.pipe()

    def note(node, *death):
        noted.append(death)
        for rank in ranks:
            rank.kill()

    monkeypatch.setattr("hpctrain.monitor.node.death_watch.os.listdir", lambda folder: [])
    monkeypatch.setattr("hpctrain.monitor.node.death_watch.note", note)
    monkeypatch.setattr("hpctrain.monitor.node.death_watch.ENDING_S", PATIENCE_S)
    if reaped:  # before the agent began: there is no descriptor of it
        os.close(lives[ranks[1].pid])
        lives[ranks[1].pid] = -1
    ranks[1].kill()
    if reaped:
        ranks[1].wait()
    death_watch.watch(SimpleNamespace(lives=lives), agent)  # type: ignore[arg-type]
    assert noted[0] == (ranks[1].pid, None if reaped else -signal.SIGKILL, True)
    assert sorted(noted[1:]) == sorted((ranks[rank].pid, -signal.SIGKILL, False) for rank in (0, 2))
    for rank in ranks:
        rank.wait()
    for descriptor in {*lives.values(), agent, still_there} - {-1}:
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
def test_a_rank_that_the_kernel_still_ends_is_awaited_before_its_victims_death_is_noted(
    monkeypatch,
):
    ranks, noted = [subprocess.Popen(["sleep", "600"]) for _ in range(2)], []
    lives, (agent, still_there) = {rank.pid: os.pidfd_open(rank.pid) for rank in ranks}, os.pipe()
    ranks[0].terminate()
    wait_for("its end", lambda: processes.look(ranks[0].pid, 0) == "Z")

    def is_ending(pid):
        ranks[1].kill()  # as if it had been under way
        return pid == ranks[1].pid

    monkeypatch.setattr("hpctrain.monitor.node.death_watch.is_ending", is_ending)
    monkeypatch.setattr("hpctrain.monitor.node.death_watch.ENDING_S", PATIENCE_S)
    monkeypatch.setattr("hpctrain.monitor.node.death_watch.os.listdir", lambda folder: [])
    monkeypatch.setattr("hpctrain.monitor.node.death_watch.note", lambda node, *death: noted.append(death))
    death_watch.watch(SimpleNamespace(lives=lives), agent)  # type: ignore[arg-type]
    assert noted == [(ranks[1].pid, -signal.SIGKILL, False), (ranks[0].pid, -signal.SIGTERM, False)]
    for rank in ranks:
        rank.wait()
    for descriptor in (*lives.values(), agent, still_there):
        os.close(descriptor)


@pytest.mark.parametrize("agent_dies", [False, True])
def test_no_death_escapes_an_agent_that_says_that_it_watches(tmp_path, monkeypatch, agent_dies):
    (tmp_path / "monitor").mkdir()
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.setenv(ATTEMPT, "1")
    layout = RingLayout(ranks=1, rows=16)
    handle, path = shared.create(layout)
    os.unlink(path)
    slot = Slot(shared.map_memory(handle, layout), layout, 0)
    slot.join()
    rank = subprocess.Popen(["sleep", "600"])
    slot.head[PID], slot.head[STARTED] = rank.pid, processes.birth(rank.pid)
    watched, watching = os.pipe()
    plan = AgentPlan(NodePlan(1, (5,), 16, 1.0), handle, layout, secrets.token_hex(32), (), 0, None, None, watching)
    agent = rank_monitor.spawn(plan, [handle, watching], RunDir(tmp_path))
    os.close(watching)
    assert select.select([watched], [], [], 60)[0], "the agent watches"
    if agent_dies:
        agent.kill()
        agent.wait()
    rank.kill()
    rank.wait()  # from now on, nobody can find out that it was there
    wait_for("the note", lambda: noted_deaths(RunDir(tmp_path), 1))
    assert [noted.rank for noted in noted_deaths(RunDir(tmp_path), 1)] == [5]
    agent.communicate(timeout=PATIENCE_S)  # all of its ranks have ended
    os.close(watched)
    os.close(handle)

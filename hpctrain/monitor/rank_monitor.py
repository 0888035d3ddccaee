"""The monitor as a rank uses it: start it, mark phases on its clock, close it. Works without the Trainer."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpctrain.comm.world import World
from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor import shared
from hpctrain.monitor.connection import listen
from hpctrain.monitor.node.agent import AgentPlan
from hpctrain.monitor.node.node import NodePlan
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.run.folder import RunDir
from hpctrain.run.grid import Grid
from hpctrain.run.rank_environment import current_attempt
from hpctrain.system import foreign_text, processes, python, shared_memory
from hpctrain.system.address import Interface, interfaces, meeting_address, routed_address
from hpctrain.system.files import make_folder, open_log
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, StopReason, Training

DUMP_ON = signal.SIGRTMAX - 3
"""Signal on which a rank writes its stacks if py-spy may not read them; not used by frameworks or schedulers."""
WATCHED_S = 5.0
"""Longest wait for the agent at the start; it imports its modules while the rank builds its task."""
CLOSE_S = 10.0
"""Longest wait for the agent at the end of a run."""
PR_SET_PTRACER = 0x59616D61


@dataclass(eq=False)
class MonitorSession:
    """One rank's part of the running monitor."""

    clock: RingClock
    """Clock on which the rank marks its phases."""
    agent: subprocess.Popen[bytes] | None = None
    """The node's agent on its first rank; None elsewhere, or without a monitor."""
    dump_file: IO[bytes] | None = None
    """File to which faulthandler writes."""
    watching: int = -1
    """Read end of a pipe whose other end the agent closes once it watches; -1 without a monitor."""

    def starts_at(self, step: int) -> None:
        """Publishes the step of the run at which this attempt starts, for events."""
        self.clock.head[shared.FIRST_STEP] = step

    def await_agent(self) -> None:
        """Waits until the agent watches; from then on it notes which of its node's ranks dies first."""
        if self.watching >= 0:
            waiting = select.poll()  # select.select refuses descriptors above 1023
            waiting.register(self.watching)
            waiting.poll(1000 * WATCHED_S)
            self.close_pipe()

    def close_pipe(self) -> None:
        """Closes the pipe that signals that the agent watches."""
        if self.watching >= 0:
            os.close(self.watching)
            self.watching = -1

    def poll(self) -> None:
        """Prints the agent's output, on the rank that started it. Never waits."""
        if self.agent is None or self.agent.stdout is None:
            return
        with contextlib.suppress(OSError):  # no output, or the console is gone
            if said := os.read(self.agent.stdout.fileno(), 1 << 16):
                sys.stdout.write(said.decode(errors="replace"))
                sys.stdout.flush()

    def __enter__(self) -> MonitorSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(orderly=kind is None)

    def close(self, orderly: bool = False) -> None:
        """Marks the rank as finished. At an orderly end, which all ranks reach, the first one waits for the agent."""
        if self.clock.head[shared.STATE] == shared.FINISHED:
            return
        self.clock.head[shared.STATE] = shared.FINISHED
        self.clock.unwatch_gc()
        self.close_pipe()
        if self.dump_file is not None:
            faulthandler.unregister(DUMP_ON)
            self.dump_file.close()
        if self.agent is not None and orderly:
            try:
                self.agent.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                processes.kill(self.agent)
            self.poll()
        if self.agent is not None and self.agent.stdout is not None:
            self.agent.stdout.close()


def start(world: World, folder: Path | str, config: MonitorConfig | None = None) -> MonitorSession:
    """Starts the monitor. Collective: every rank of the world calls it at the same point.

    One rank per node starts the node's agent. If that fails, training continues without a monitor.

    Args:
        world: all ranks.
        folder: the run folder; the monitor writes to its ``monitor`` folder.
        config: thresholds and actions; defaults to the run file's defaults, except that a hang is only reported.

    Returns:
        This rank's session, a context manager that closes it on exit.
    """
    config = config or MonitorConfig(on_hang="report")
    if not config.enabled:
        return MonitorSession(RingClock())
    memory, problem = join_memory(world, shared.RingLayout(world.local_size, max(1024, 8 * config.window_steps)))
    problems = [text for text in world.everyone.allgather(problem, "share memory with the monitor") if text]
    if problems or memory is None:
        if world.rank == 0:
            foreign_text.show(f"hpctrain monitor: not watching this run: {problems[0]}", sys.stderr)
        return MonitorSession(RingClock())
    handle, layout, clock = memory
    watched, watching = os.pipe()
    agent = start_agent(world, RunDir(Path(folder)), config, handle, layout, watching)
    os.close(watching)
    os.close(handle)
    pids = world.local.allgather(agent.pid if agent else 0, "learn the process of the agent")
    clock.watch_gc()
    return MonitorSession(clock, agent, prepare_dumps(clock, pids[0]), watched)


def join_memory(world: World, layout: shared.RingLayout) -> tuple[tuple[int, shared.RingLayout, RingClock] | None, str]:
    """Opens the node's shared memory with a clock on this rank's slot. Returns None and the reason if it cannot."""
    handle = -1
    path = ""
    problem = ""
    if world.local_rank == 0:
        try:
            handle, path = shared.create(layout)
        except OSError as error:
            problem = f"{layout.size} bytes of shared memory on {world.host}: {error.strerror}"
    path = world.local.allgather(path, "share memory with the monitor")[0]
    clock = None
    try:
        if path and world.local_rank:
            handle = shared_memory.attach(path)
        if path:
            slot = shared.Slot(shared.map_memory(handle, layout), layout, world.local_rank)
            slot.join()
            clock = RingClock(slot)
    except OSError as error:
        problem = f"the node's shared memory on {world.host}: {error.strerror}"
    world.local.barrier("open the monitor's memory")
    if world.local_rank == 0 and path:
        os.unlink(path)
    return (handle, layout, clock) if clock else None, problem


def start_agent(
    world: World, folder: RunDir, config: MonitorConfig, handle: int, layout: shared.RingLayout, watching: int
) -> subprocess.Popen[bytes] | None:
    """Starts this node's agent on the node's first rank, with the address of the first node's agent. Collective."""
    own = interfaces() if world.local_rank == 0 and world.nodes > 1 else []
    reached_at = [interface.address for interface in own] if world.local_rank == 0 else None
    introduction = [world.host, world.node, reached_at]
    introductions = world.everyone.allgather(introduction, "register with the monitor")
    listener = None
    meeting: dict[str, object] = {}
    if world.rank == 0:
        others = [addresses for _, node, addresses in introductions if addresses is not None and node]
        try:
            make_folder(folder.monitor, folder.path)
            listener, addresses = listen_for(own, others) if world.nodes > 1 else (None, [])
            port = listener.getsockname()[1] if listener else 0
            meeting = {"addresses": addresses, "port": port, "token": secrets.token_hex(32)}
        except OSError as error:  # the other ranks wait for an answer
            foreign_text.show(f"hpctrain monitor: not watching this run: {error}", sys.stderr)
    meeting = world.everyone.broadcast(meeting, "learn the address of the monitor")
    if not meeting:
        return None
    local_ranks = world.local.allgather(world.rank, "name the ranks to the monitor")
    if world.local_rank != 0:
        return None
    plan = AgentPlan(
        node=NodePlan(world.node, tuple(local_ranks), config.window_steps, config.host_interval_s),
        memory=handle,
        layout=layout,
        listener=listener.fileno() if listener else None,
        chief={
            "hosts": [host for host, *_ in introductions],
            "nodes": [node for _, node, _ in introductions],
            "folder": str(folder.path.absolute()),
            "attempt": current_attempt(),
            "config": dataclasses.asdict(config),
            "grid": dataclasses.asdict(Grid(world.size, world.tensor.size, world.pipeline.size)),
        }
        if world.rank == 0
        else None,
        watching=watching,
        **meeting,  # type: ignore[arg-type]
    )
    keep = [handle, watching] + ([listener.fileno()] if listener else [])
    try:
        return spawn(plan, keep, folder)
    except OSError as error:
        foreign_text.show(f"hpctrain monitor: no agent on {world.host}: {error.strerror}", sys.stderr)
        return None
    finally:
        if listener:
            listener.close()


def listen_for(own: list[Interface], others: list[list[str]]) -> tuple[socket.socket, list[str]]:
    """Opens a listening socket on the network that the job's hosts share. Returns it and its addresses.

    Without a shared network it listens on the address that routes to the others; without a route, on all addresses.
    """
    address = meeting_address(own, others) or routed_address(others)
    return listen(address), [address] if address else [*(one.address for one in own), socket.gethostname()]


def spawn(plan: AgentPlan, keep: list[int], folder: RunDir) -> subprocess.Popen[bytes]:
    """Starts the agent's process in its own session, so that signals to the rank's process group do not reach it."""
    environment = python.environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    log_file = folder.monitor / f"agent-{plan.node.node}.log"
    with tempfile.TemporaryFile() as stdin, os.fdopen(open_log(log_file, folder.path), "ab") as log:
        stdin.write(json.dumps(dataclasses.asdict(plan)).encode())
        stdin.seek(0)
        agent = subprocess.Popen(
            python.module("hpctrain.monitor.node.agent"),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=keep,
            env=environment,
            start_new_session=True,
        )
    assert agent.stdout is not None
    os.set_blocking(agent.stdout.fileno(), False)
    return agent


def prepare_dumps(clock: RingClock, agent: int) -> IO[bytes] | None:
    """Lets the agent read this process's stacks: as a permitted tracer (Yama), or through faulthandler on a signal."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(agent), 0, 0, 0)
    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 closed with the session
        faulthandler.register(DUMP_ON, file=file, all_threads=True)
    except (OSError, RuntimeError):
        return None
    clock.head[shared.DUMP_FILE] = file.fileno()
    clock.head[shared.DUMP_SIGNAL] = DUMP_ON
    return file


PRINT_STEPS = 32
"""Steps between polls of the monitor's output."""


class MonitorHook(BaseHook):
    """Prints the monitor's output and closes the session with the run; the clock and the agent do the watching.

    Args:
        session: started before the loop was built, since the framework marks its phases on the session's clock.
    """

    def __init__(self, session: MonitorSession) -> None:
        self.session = session
        self.steps = 0
        self.orderly = False

    def before_fit(self, training: Training) -> None:
        self.session.await_agent()

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        if self.steps == 0:
            self.session.starts_at(training.state.step - 1)
        self.steps += 1
        if self.steps % PRINT_STEPS == 0:
            self.session.poll()
        return None

    def after_fit(self, training: Training, reason: StopReason) -> None:
        self.orderly = True

    def close(self) -> None:
        self.session.close(self.orderly)

"""The supervisor's side: accepts nodes' connections and forwards mpirun's commands to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.errors import RunFailed
from hpctrain.launch.runners.link import Link, Lost, MessageKind, admit, listening_context
from hpctrain.launch.runners.ticket import Ticket
from hpctrain.system.address import listen
from hpctrain.system.channel import GREETING_S
from hpctrain.system.output import say

STRANGERS = 64
"""Maximum number of unauthenticated connections; if there are more, the oldest is dropped."""
PATIENCE = 32
"""Consecutive unauthenticated connections after which only one is accepted every PAUSE_S."""
PAUSE_S = 0.1
BACKLOG = 64
"""Connections that the kernel queues; a node in the queue waits at most PAUSE_S for each one before it."""
FAREWELL_S = 2.0
"""Timeout for closing connections."""
NODE_LOST = b"255"
"""Exit code of a command whose node is lost, as with ssh."""


class Desk:
    """Serves nodes and mpirun in a separate thread, which ``opened`` starts and ends.

    Args:
        key: the run's key.
        path: path of the Unix socket for ``ask``.
    """

    def __init__(self, key: bytes, path: Path) -> None:
        self.key = key
        self.path = path
        self.shown = listening_context(path.parent)
        self.port = 0
        self.nodes: dict[str, dict[str, Any]] = {}
        """What each node reports about itself, by host name in order of arrival; includes lost nodes."""
        self.lost: set[str] = set()
        self.changed = threading.Condition()
        self.links: dict[str, Link] = {}
        self.askers: dict[int, tuple[str, asyncio.StreamWriter]] = {}
        """For each running command its host, and the connection to the ``ask`` process that waits for it."""
        self.numbers = itertools.count(1)
        self.strangers: dict[asyncio.StreamWriter, None] = {}
        """Unauthenticated connections, oldest first."""
        self.in_row = 0
        """Number of connections since the last authenticated one."""

    def wait_for(self, count: int, timeout_s: float) -> list[str]:
        """Waits for ``count`` nodes; returns the host names of the connected nodes in order of arrival.

        Raises:
            RunFailed: they did not connect within ``timeout_s``.
        """
        with self.changed:
            in_time = self.changed.wait_for(lambda: len(self.links) >= count, min(timeout_s, threading.TIMEOUT_MAX))
            names = list(self.links)
        if not in_time:
            what = f"{len(names)} of {count} nodes have joined within {timeout_s:.0f} s"
            raise RunFailed(what, "start hpctrain node on each node")
        return names

    async def serve(self, port: int, ready: Future[Callable[[], object]]) -> None:
        """Serves until ended. Sets ``ready`` to a function that ends it, to be called from another thread."""
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        listener = listen(None, port)
        listener.setblocking(False)
        listener.listen(BACKLOG)
        folder_number = os.open(self.path.parent, os.O_PATH)  # socket paths are limited to 107 bytes
        local = await asyncio.start_unix_server(self.pass_on, f"/proc/self/fd/{folder_number}/{self.path.name}")
        os.close(folder_number)
        self.port = listener.getsockname()[1]
        door = asyncio.create_task(self.admit(listener))
        ready.set_result(lambda: loop.call_soon_threadsafe(over.set))
        await over.wait()
        door.cancel()
        listener.close()
        local.close()
        leaving = list(self.links.values())
        for link in leaving:
            link.send(MessageKind.LEAVE)
            link.writer.close()
        with contextlib.suppress(TimeoutError):
            gone = asyncio.gather(*(link.writer.wait_closed() for link in leaving), return_exceptions=True)
            await asyncio.wait_for(gone, FAREWELL_S)

    async def admit(self, listener: socket.socket) -> None:
        """Accepts connections, at a limited rate while none of them authenticates."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):  # closed before it was accepted, or no file descriptor is left
                stream, _ = await loop.sock_accept(listener)
                made = partial(asyncio.StreamReaderProtocol, asyncio.StreamReader(), self.arrive)
                await loop.connect_accepted_socket(made, stream)
                self.in_row += 1
                if self.in_row <= PATIENCE:
                    continue
            await asyncio.sleep(PAUSE_S)

    async def arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection, and closes it."""
        self.strangers[writer] = None
        if len(self.strangers) > STRANGERS:
            next(iter(self.strangers)).transport.abort()
        try:
            with contextlib.suppress(Lost, OSError, ValueError, KeyError, asyncio.CancelledError):
                await self.attend(Link(reader, writer))
            writer.close()
            with contextlib.suppress(OSError):
                await asyncio.wait_for(writer.wait_closed(), FAREWELL_S)  # the last message must arrive
        finally:
            self.strangers.pop(writer, None)
            writer.transport.abort()

    async def attend(self, link: Link) -> None:
        """Authenticates a node and serves it until it is lost."""
        async with asyncio.timeout(GREETING_S):
            await admit(link, self.key, *self.shown)
            _, _, hello = await link.receive()
            facts = json.loads(hello)
            host = str(facts["host"])
        self.in_row = 0
        del self.strangers[link.writer]
        if host in self.links:
            return
        self.note(host, link, facts)
        beat = asyncio.create_task(link.beat())
        try:
            while True:
                kind, number, content = await link.receive()
                if kind is MessageKind.GOING:
                    say(f"{host} is about to go away: the run saves and stops")
                    os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler would
                elif number in self.askers:
                    Link(link.reader, self.askers[number][1]).send(kind, number, content)
        finally:
            beat.cancel()
            self.note(host, None, facts)
            for of_host, asker in self.askers.values():
                if of_host == host:
                    Link(link.reader, asker).send(MessageKind.EXIT, 0, NODE_LOST)

    def note(self, host: str, link: Link | None, facts: dict[str, Any]) -> None:
        """Records that a node has connected, or with ``link`` None that it is lost."""
        with self.changed:
            if link:
                self.nodes[host] = facts
                self.links[host] = link
                self.lost.discard(host)
            else:
                del self.links[host]
                self.lost.add(host)
            self.changed.notify_all()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one command from ``ask`` to its node; stops the command when ``ask`` disconnects."""
        number = next(self.numbers)
        with contextlib.suppress(OSError, ValueError):
            wanted = json.loads(await reader.readline())
            if link := self.links.get(wanted["host"]):
                self.askers[number] = (wanted["host"], writer)
                link.send(MessageKind.RUN, number, wanted["command"].encode())
                await reader.read()
                if self.links.get(wanted["host"]) is link:
                    link.send(MessageKind.STOP, number)
        self.askers.pop(number, None)
        writer.close()


@contextlib.contextmanager
def opened(ticket: Ticket, folder: Path) -> Iterator[Desk]:
    """Opens a desk that listens on the ticket's port; on exit its nodes are sent away.

    Args:
        ticket: gives the port and the run's key.
        folder: folder for the socket, private to this user.

    Raises:
        UserError: see ``listening_context``.
        RunFailed: the port is in use.
    """
    desk = Desk(ticket.key, folder / "ask")
    ready: Future[Callable[[], object]] = Future()

    def serve() -> None:
        try:
            asyncio.run(desk.serve(ticket.port, ready))
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=serve, name="nodes", daemon=True)
    thread.start()
    try:
        end = ready.result()
    except OSError as error:
        raise RunFailed(f"cannot listen for nodes: {error}", "give another port") from error
    try:
        yield desk
    finally:
        end()
        thread.join()

"""``hpctrain node``: connects to a run's supervisor, and starts and ends commands for it on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping

import psutil

from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.runners.link import Link, Lost, MessageKind, greet
from hpctrain.launch.runners.ticket import ADDRESS, KEY, Ticket
from hpctrain.system import processes
from hpctrain.system.address import interfaces
from hpctrain.system.cgroups import usable_cores
from hpctrain.system.channel import GREETING_S, ProtocolError
from hpctrain.system.gpus import usable_gpus
from hpctrain.system.output import say

RETRY_S = 0.5
REAP_S = 1.0
LEAVE_S = 0.5
GOING = signal.SIGUSR1
"""Signal that this machine is going to be taken away: asks the run to save and stop, and serves it until it has."""
READ_BYTES = 1 << 16
NOT_STARTED = b"126"
"""Exit code of a command that could not be started, as in a shell."""


def run(find: Callable[[], Ticket], timeout_s: float) -> None:
    """Serves one run until it is over.

    Args:
        find: returns the ticket of the supervisor; raises OSError while there is none.
        timeout_s: longest wait for the supervisor, in seconds.

    Raises:
        UserError: what answers does not hold the run's key.
        RunFailed: no supervisor was found, or the connection was lost.
    """
    processes.adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP, GOING):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        asyncio.run(_serve(find, timeout_s))
    except Lost as error:
        raise RunFailed(f"the supervisor is gone: {error}", "see how the run ended") from error
    finally:
        processes.end_descendants(0.0)


async def _serve(find: Callable[[], Ticket], timeout_s: float) -> None:
    link = await _connect(find, timeout_s)
    for name in (KEY, ADDRESS):  # ranks must not have them
        os.environ.pop(name, None)
    host = socket.gethostname()
    facts: dict[str, object] = {"host": host, "cores": usable_cores(), "memory": psutil.virtual_memory().total}
    facts |= {"gpus": len(usable_gpus()), "addresses": [each.address for each in interfaces()]}
    link.send(MessageKind.HELLO, content=json.dumps(facts).encode())
    say(f"{host} serves the run")
    asyncio.get_running_loop().add_signal_handler(GOING, link.send, MessageKind.GOING)
    commands: dict[int, asyncio.Task[None]] = {}
    started: dict[int, Process | None] = {}
    async with _beating(link), _reaping(started), _ending(commands):
        while (said := await link.receive())[0] is not MessageKind.LEAVE:
            kind, number, content = said
            if kind is MessageKind.RUN:
                commands[number] = asyncio.create_task(_run(link, number, os.fsdecode(content), started))
                commands[number].add_done_callback(lambda _, number=number: commands.pop(number))  # type: ignore[misc]
            elif kind is MessageKind.STOP and (child := started.get(number)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)
            elif kind is MessageKind.STOP and number in commands:
                commands[number].cancel()  # its process has not been started yet


@contextlib.asynccontextmanager
async def _beating(link: Link) -> AsyncIterator[None]:
    beat = asyncio.create_task(link.beat())
    try:
        yield
    finally:
        beat.cancel()
        link.writer.close()


@contextlib.asynccontextmanager
async def _ending(commands: Mapping[int, asyncio.Task[None]]) -> AsyncIterator[None]:
    """On exit kills all processes while asyncio can still see them end; it would print tracebacks otherwise."""
    try:
        yield
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*commands.values(), return_exceptions=True), LEAVE_S)


@contextlib.asynccontextmanager
async def _reaping(started: Mapping[int, Process | None]) -> AsyncIterator[None]:
    """Reaps adopted processes as they end: a run of several days may leave thousands, and process IDs run out."""

    async def reap() -> None:
        while True:
            await asyncio.sleep(REAP_S)
            own = {child and child.pid for child in started.values()}
            with contextlib.suppress(ChildProcessError):
                while None not in own and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                    if ended.si_pid in own:
                        break  # asyncio reaps it
                    os.waitpid(ended.si_pid, os.WNOHANG)

    task = asyncio.create_task(reap())
    try:
        yield
    finally:
        task.cancel()


async def _connect(find: Callable[[], Ticket], timeout_s: float) -> Link:
    """Connects to the supervisor.

    Raises:
        UserError: what answers does not hold the key.
        RunFailed: nothing answered in time.
    """
    end = time.monotonic() + timeout_s
    problem = "no ticket"
    while time.monotonic() < end:
        with contextlib.suppress(OSError):  # no ticket yet, or the file server does not answer
            ticket = find()
            for address in ticket.addresses:
                try:
                    return await _call(address, ticket)
                except ProtocolError as error:
                    fix = "use the ticket, or the key, of this run"
                    raise UserError(f"{address}:{ticket.port} is not the supervisor: {error}", fix) from error
                except (Lost, OSError, TimeoutError) as error:
                    problem = f"{address}:{ticket.port}: {error or type(error).__name__}"
        await asyncio.sleep(RETRY_S)
    fix = "start hpctrain run first, and see that nodes reach its host"
    raise RunFailed(f"no supervisor was found within {timeout_s:.0f} s: {problem}", fix)


async def _call(address: str, ticket: Ticket) -> Link:
    """Opens an authenticated connection. Raises Lost, OSError, TimeoutError."""
    async with asyncio.timeout(GREETING_S):
        link = Link(*await asyncio.open_connection(address, ticket.port))
        try:
            await greet(link, ticket.key)
        except BaseException:
            link.writer.transport.abort()
            raise
        return link


def lives(ticket: Ticket) -> bool:
    """Whether the supervisor of a ticket can be reached from here."""

    async def ask() -> bool:
        tried = await asyncio.gather(*(_call(each, ticket) for each in ticket.addresses), return_exceptions=True)
        links = [each for each in tried if isinstance(each, Link)]
        for link in links:
            link.writer.transport.abort()
        return bool(links)

    return asyncio.run(ask())


async def _run(link: Link, number: int, command: str, started: dict[int, Process | None]) -> None:
    started[number] = None  # being started: its process ID is not known yet
    try:
        try:
            child = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", command, start_new_session=True, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
            )
        except OSError as error:  # out of processes or file descriptors
            link.send(MessageKind.ERR, number, f"hpctrain node: {error}\n".encode())
            link.send(MessageKind.EXIT, number, NOT_STARTED)
            return
        started[number] = child
        assert child.stdout is not None and child.stderr is not None
        said = (
            _forward(link, MessageKind.OUT, number, child.stdout),
            _forward(link, MessageKind.ERR, number, child.stderr),
        )
        await asyncio.gather(*said)
        code = await child.wait()
    finally:
        del started[number]
    link.send(MessageKind.EXIT, number, str(code if code >= 0 else 128 - code).encode())


async def _forward(link: Link, kind: MessageKind, number: int, output: asyncio.StreamReader) -> None:
    while content := await output.read(READ_BYTES):
        link.send(kind, number, content)
        await link.writer.drain()

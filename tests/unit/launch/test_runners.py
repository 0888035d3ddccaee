"""Nodes that dial home: what is started there and ends with whom, and who is not let in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import os
import secrets
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from hpctrain.errors import ExitCode, RunFailed, UserError
from hpctrain.launch.runners import ask, desk, ticket
from hpctrain.launch.runners import runner as run_node
from hpctrain.launch.runners.desk import Desk
from hpctrain.launch.runners.link import NOBODY, calling_context, listening_context
from hpctrain.launch.runners.ticket import Ticket
from hpctrain.system.channel import NONCE_BYTES
from tests.support.command import wait_for
from tests.support.mpi import PATIENCE_S

HOST = socket.gethostname()

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Desk]:
    """A supervisor's desk."""
    (tmp_path / "desk").mkdir(0o700)
    with desk.opened(ticket.fresh(), tmp_path / "desk") as made:
        yield made


def ticket_of(opened: Desk, **other: object) -> Ticket:
    return dataclasses.replace(Ticket(("127.0.0.1",), opened.port, opened.key), **other)  # type: ignore[arg-type]


@contextlib.contextmanager
def node(shown: Ticket, folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`hpctrain node` with a ticket."""
    shown.write(folder / "ticket")
    command = [sys.executable, "-m", "hpctrain", "node", str(folder / "ticket"), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.terminate()


def asked(opened: Desk, command: str, host: str = HOST) -> subprocess.CompletedProcess[str]:
    """What mpirun would get."""
    words = [sys.executable, "-I", "-S", ask.__file__, str(opened.path), host, command]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_a_node_runs_what_is_asked_and_leaves_when_the_run_is_over(tmp_path):
    (tmp_path / "desk").mkdir()
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(desk.opened(ticket.fresh(), tmp_path / "desk"))
        with node(ticket_of(opened), tmp_path) as started:
            assert opened.wait_for(1, PATIENCE_S) == [HOST]
            facts = opened.nodes[HOST]
            assert facts["cores"] >= 1 and facts["memory"] > 1 << 20 and facts["gpus"] >= 0 and facts["addresses"]
            done = asked(opened, 'echo "out $HPCTRAIN_NODE_KEY"; echo err >&2; exit 7')
            assert (done.stdout, done.stderr, done.returncode) == ("out \n", "err\n", 7)
            large = asked(opened, f"{sys.executable} -c 'print(\"x\" * 3_000_000)'")
            assert len(large.stdout) == 3_000_001
            assert asked(opened, "true", "nowhere").returncode == 255
            stack.close()
            assert started.wait(PATIENCE_S) == ExitCode.DONE


def test_what_is_wanted_no_more_is_ended(opened, tmp_path):
    with node(ticket_of(opened), tmp_path):
        opened.wait_for(1, PATIENCE_S)
        words = [sys.executable, "-I", "-S", ask.__file__, str(opened.path), HOST, "echo $$; exec sleep 600"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            pid = int(asking.stdout.readline())
            asking.kill()
            wait_for("end", lambda: not psutil.pid_exists(pid))


SUPERVISOR = """
import sys, time
from pathlib import Path
from hpctrain.launch.runners import desk, ticket
with desk.opened(ticket.fresh(), Path(sys.argv[1])) as opened:
    ticket.Ticket(("127.0.0.1",), opened.port, opened.key).write(Path(sys.argv[2]))
    opened.wait_for(1, 60)
    print(opened.path, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "the connection has ended"),
        (signal.SIGABRT, "the connection has ended"),
        (signal.SIGSTOP, "it has been silent for 5 s"),
    ],
)
def test_a_node_ends_with_its_supervisor_and_takes_along_what_it_started(number, why, tmp_path):
    """It sees at once that a process has gone, and hears nothing of one that is stopped."""
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(tmp_path / "ticket")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        words = [sys.executable, "-m", "hpctrain", "node", str(tmp_path / "ticket")]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as started:
            path = supervisor.stdout.readline().strip()
            hidden = "setsid sh -c 'echo $$; trap : TERM HUP; sleep 600 & wait; wait; sleep 600' & wait"
            asking = subprocess.Popen(
                [sys.executable, "-I", "-S", ask.__file__, path, HOST, hidden], stdout=subprocess.PIPE, text=True
            )
            assert asking.stdout is not None
            pid = int(asking.stdout.readline())
            supervisor.send_signal(number)
            assert started.wait(PATIENCE_S) == ExitCode.FAILURE
            assert started.stderr is not None
            _, gone, fix = started.stderr.read().splitlines()
            assert gone == f"hpctrain: the supervisor is gone: {why}" and "how the run ended" in fix
            wait_for("end", lambda: not psutil.pid_exists(pid))
            supervisor.kill()
            asking.communicate(timeout=PATIENCE_S)


def test_a_lost_node_is_known(opened, tmp_path):
    with node(ticket_of(opened), tmp_path) as started:
        opened.wait_for(1, PATIENCE_S)
        found: list[int] = []
        waits = threading.Thread(target=lambda: found.append(asked(opened, "sleep 600").returncode))
        waits.start()
        wait_for("asker", lambda: bool(opened.askers))
        for child in psutil.Process(started.pid).children(recursive=True):
            child.kill()
        started.kill()
        waits.join(PATIENCE_S)
        assert found and opened.lost == {HOST}


def test_another_key_is_refused_on_both_sides(opened, tmp_path):
    with node(ticket_of(opened, key=secrets.token_bytes(32)), tmp_path) as started:
        assert started.wait(PATIENCE_S) == ExitCode.USER_ERROR
        assert started.stderr is not None and "is not the supervisor" in started.stderr.read()
    assert not opened.nodes


async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while content := await source.read(1 << 16):
            seen += content
            sink.write(content)
            await sink.drain()
    sink.close()


@contextlib.contextmanager
def between(port: int, seen: bytearray, folder: Path | None = None) -> Iterator[int]:
    """Who passes on what nodes and the supervisor on ``port`` say: as it comes, or with TLS of its own to either."""
    inward = listening_context(folder)[0] if folder else None
    outward = calling_context() if folder else None
    ready: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            answers, away = await asyncio.open_connection("127.0.0.1", port)
            away.write(await reader.readexactly(2 * NONCE_BYTES))
            writer.write(await answers.readexactly(NONCE_BYTES))
            if inward and outward:
                await asyncio.gather(writer.start_tls(inward), away.start_tls(outward))
            await asyncio.gather(pipe(reader, away, seen), pipe(answers, writer, bytearray()))
        writer.close()

    async def serve() -> None:
        over = asyncio.Event()
        server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        ready.set_result((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), over))
        await over.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    listens_on, loop, over = ready.result(PATIENCE_S)
    try:
        yield listens_on
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


def test_nothing_can_be_read_on_the_way(opened, tmp_path):
    seen = bytearray()
    with between(opened.port, seen) as port, node(ticket_of(opened, port=port), tmp_path):
        opened.wait_for(1, PATIENCE_S)
        assert asked(opened, "echo a secret").stdout == "a secret\n"
    assert len(seen) > 300 and b"secret" not in seen and HOST.encode() not in seen
    wait_for("end of the node", lambda: opened.lost == {HOST})
    with socket.create_connection(("127.0.0.1", opened.port), PATIENCE_S) as again:
        again.sendall(seen)
        with contextlib.suppress(ConnectionResetError):
            while again.recv(1 << 16):
                pass
    assert not opened.links, "what was recorded is of no use"


def test_who_is_between_with_tls_of_its_own_is_found_out(opened, tmp_path):
    seen = bytearray()
    (tmp_path / "between").mkdir(0o700)
    with (
        between(opened.port, seen, tmp_path / "between") as port,
        node(ticket_of(opened, port=port), tmp_path) as started,
    ):
        assert started.wait(PATIENCE_S) == ExitCode.USER_ERROR
    assert not opened.nodes


def test_strangers_hold_few_descriptors_and_keep_no_nodes_out(tmp_path):
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(tmp_path / "ticket")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor, contextlib.ExitStack() as stack:
        wait_for("ticket", (tmp_path / "ticket").exists)
        given, descriptors = ticket.read(tmp_path / "ticket"), psutil.Process(supervisor.pid).num_fds
        before = descriptors()
        for _ in range(desk.STRANGERS + 16):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", given.port))
        wait_for("strangers", lambda: descriptors() >= before + desk.STRANGERS)
        (tmp_path / "node").mkdir()
        with node(given, tmp_path / "node"):
            assert supervisor.stdout is not None and supervisor.stdout.readline()
            assert descriptors() <= before + desk.STRANGERS + 4
            supervisor.kill()


def test_a_ticket_of_a_run_that_lives_stays(opened, tmp_path):
    path, other = tmp_path / "ticket", ticket.fresh()
    ticket_of(opened).write(path)
    with pytest.raises(UserError, match="belongs to another live run"):
        other.write(path, run_node.lives)
    assert ticket.read(path) == ticket_of(opened)
    dead = dataclasses.replace(ticket_of(opened), key=secrets.token_bytes(32))
    dead.write(path)
    other.write(path, run_node.lives)
    ticket_of(opened).remove(path)
    assert ticket.read(path) == other and sorted(tmp_path.iterdir()) == [tmp_path / "desk", path]
    other.remove(path)
    assert not path.exists()


def test_of_several_runs_one_gets_a_dead_runs_ticket(tmp_path):
    path, dead, quicker, slower = tmp_path / "ticket", *(ticket.fresh() for _ in range(3))
    dead.write(path)

    def meanwhile(other):
        assert other == dead
        quicker.write(path)
        return False

    with pytest.raises(UserError, match="belongs to another live run"):
        slower.write(path, meanwhile)
    assert ticket.read(path) == quicker and list(tmp_path.iterdir()) == [path]


def test_adopted_processes_are_collected_as_they_end(opened, tmp_path):
    with node(ticket_of(opened), tmp_path) as started:
        opened.wait_for(1, PATIENCE_S)
        words = [sys.executable, "-I", "-S", ask.__file__, str(opened.path), HOST, "sleep 600"]
        with subprocess.Popen(words) as asking:
            wait_for("asker", lambda: bool(opened.askers))
            orphans = "for _ in 1 2 3 4 5; do (setsid sh -c 'echo $$; exec sleep 0.2' &); done"
            left = [psutil.Process(int(pid)) for pid in asked(opened, orphans).stdout.split()]
            wait_for("ends", lambda: not any(each.is_running() for each in left))
            assert asked(opened, "exit 3").returncode == 3 and started.poll() is None
            asking.terminate()


def test_tickets_are_private_and_complete(tmp_path, monkeypatch):
    made = ticket.fresh()
    made.write(tmp_path / "ticket")
    assert stat.S_IMODE((tmp_path / "ticket").stat().st_mode) == 0o600
    assert ticket.read(tmp_path / "ticket") == made and made.addresses
    (tmp_path / "ticket").chmod(0o644)
    with pytest.raises(UserError, match="open to other users"):
        ticket.read(tmp_path / "ticket")
    (tmp_path / "ticket").chmod(0o600)
    (tmp_path / "ticket").write_text("{}")
    with pytest.raises(UserError, match="is not a ticket"):
        ticket.read(tmp_path / "ticket")
    with pytest.raises(UserError, match=r"launch\.ticket"):
        made.write(tmp_path / "no" / "ticket")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"launch\.ticket"):
        made.write(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "ticket"]


def test_pods_are_told_by_their_environment():
    key = "ab" * 32
    given = {ticket.KEY: key, ticket.ADDRESS: "run-0.run:7777"}
    assert ticket.of_environment(given) == Ticket(("run-0.run",), 7777, bytes.fromhex(key))
    assert ticket.of_environment({**given, ticket.ADDRESS: "[::1]:1"}) == Ticket(("::1",), 1, bytes.fromhex(key))
    several = Ticket(("10.0.0.1", "fe80::1", "127.0.0.1"), 7777, bytes.fromhex(key))
    assert ticket.of_environment(several.variables) == several
    assert ticket.of_environment({}) is None
    for wrong in ({ticket.KEY: "abc"}, {ticket.KEY: "ab"}, {ticket.ADDRESS: "run"}, {ticket.ADDRESS: ":7"}):
        with pytest.raises(UserError, match="do not say how to find the supervisor"):
            ticket.of_environment({**given, **wrong})


def test_nodes_that_do_not_come_are_counted(opened):
    with pytest.raises(RunFailed, match="0 of 2 nodes have joined within 0 s"):
        opened.wait_for(2, 0.1)


def test_a_node_without_a_supervisor_ends(tmp_path):
    with socket.socket() as silent, contextlib.ExitStack() as stack:
        silent.bind(("127.0.0.1", 0))  # nobody else gets it
        shown = Ticket(("127.0.0.1",), silent.getsockname()[1], b"k" * 32)
        started = stack.enter_context(node(shown, tmp_path, "--wait", "1"))
        assert started.wait(PATIENCE_S) == ExitCode.FAILURE
        assert started.stderr is not None and "no supervisor was found within 1 s" in started.stderr.read()


def test_only_new_tls_is_spoken(opened):
    context = calling_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", opened.port)) as stream, pytest.raises(ssl.SSLError):
        nonce = secrets.token_bytes(NONCE_BYTES)
        stream.sendall(nonce + hmac.digest(opened.key, b"knock\0" + nonce, "sha256"))
        assert stream.recv(NONCE_BYTES) != NOBODY
        context.wrap_socket(stream)


def test_a_terminated_node_takes_its_commands_along(opened, tmp_path):
    with node(ticket_of(opened), tmp_path) as started:
        opened.wait_for(1, PATIENCE_S)
        words = [sys.executable, "-I", "-S", ask.__file__, str(opened.path), HOST, "echo $$; sleep 600"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            pid = int(asking.stdout.readline())
            os.kill(started.pid, signal.SIGTERM)
            assert started.wait(PATIENCE_S) == 128 + signal.SIGTERM and asking.wait(PATIENCE_S) == 255
            wait_for("end", lambda: not psutil.pid_exists(pid))


def test_nodes_may_be_waited_for_without_a_limit(opened, tmp_path):
    with node(ticket_of(opened), tmp_path):
        assert opened.wait_for(1, float("inf")) == [HOST]

"""Ranks without the seconds that importing a framework takes: a process that has imported it forks them.

mpirun starts a stand-in for each rank (``stand_in.py``), which hands its arguments, environment, folder and standard
streams to that process, and passes signals on to the fork and its end back. To MPI the fork is the rank. All forks
share the seed of Python's hashes; otherwise they are what ranks that mpirun has started are.

    python -m tests.support.warm_ranks SOCKET FRAMEWORK
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.system.processes import die_with_parent

MODULES = {
    "torch": ("hpctrain.frameworks.torch.framework", "tests.support.torch_tasks"),
    "tensorflow": ("hpctrain.frameworks.tensorflow.framework", "tests.support.tensorflow_tasks"),
}
"""What is imported beforehand for programs of a framework."""
COMMON = ("hpctrain.rank.wiring", "hpctrain.checkpoint.hook")
START_S = 120.0


@dataclass(frozen=True)
class Order:
    """What a stand-in asks for."""

    argv: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    streams: Sequence[int]


@functools.cache
def preloaded(framework: str, environment: tuple[tuple[str, str], ...]) -> Path:
    """The socket of a process that has imported a framework; it is started once, and ends with this one."""
    path = Path(tempfile.mkdtemp(prefix="ranks-")) / "socket"
    words = [sys.executable, "-m", "tests.support.warm_ranks", str(path), framework]
    parent = subprocess.Popen(
        words, env=dict(environment), cwd=path.parent, stdin=subprocess.DEVNULL, start_new_session=True
    )
    atexit.register(end, parent, path.parent)
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert parent.poll() is None and time.monotonic() < deadline, f"{' '.join(words)} does not start"
        time.sleep(0.05)
    return path


def end(parent: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends a process of `preloaded`."""
    parent.kill()
    parent.wait()
    shutil.rmtree(folder)


def command(framework: str, environment: Mapping[str, str]) -> list[str]:
    """What mpirun starts in place of Python, before the program and its arguments."""
    path = preloaded(framework, tuple(sorted(environment.items())))
    stand_in = Path(__file__).with_name("stand_in.py")
    return [sys.executable, "-I", "-S", str(stand_in), str(path)]


def serve(path: str) -> Order:
    """Forks a rank for each stand-in; returns in the fork only."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    ended, note = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ranks: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is listener:
                    asking, _ = listener.accept()
                    order = _read(asking)
                    pid = os.fork()
                    if pid == 0:
                        _forget([listener, asking, *ranks.values()], [ended, note])
                        return order
                    for stream in order.streams:
                        os.close(stream)
                    ranks[pid] = asking
                    events.register(asking, selectors.EVENT_READ, pid)
                    asking.sendall(b"%d\n" % pid)
                elif key.fileobj == ended:
                    os.read(ended, 4096)
                elif key.data in ranks:  # its stand-in is gone
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)
                    events.unregister(ranks[key.data])
                    ranks.pop(key.data).close()
            for pid, status in _reap():
                if pid in ranks:
                    with contextlib.suppress(OSError):
                        ranks[pid].sendall(b"%d\n" % status)
                    events.unregister(ranks[pid])
                    ranks.pop(pid).close()


def _read(asking: socket.socket) -> Order:
    text, streams, _, _ = socket.recv_fds(asking, 1 << 16, 3)
    while not text.endswith(b"\n"):
        text += asking.recv(1 << 16)
    argv, folder, environment = json.loads(text)
    return Order(argv, folder, environment, streams)


def _reap() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _forget(sockets: Sequence[socket.socket], descriptors: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in sockets:
        each.close()
    for descriptor in descriptors:
        os.close(descriptor)


def become(order: Order) -> None:
    """Makes this process what Python is at the start of a program."""
    die_with_parent()
    for descriptor, stream in enumerate(order.streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = list(order.argv)
    sys.path[0] = str(Path(order.argv[0]).parent)
    importlib.import_module("numpy").random.seed()


if __name__ == "__main__":
    die_with_parent()
    for module in (*COMMON, *MODULES[sys.argv[2]]):
        importlib.import_module(module)
    become(serve(sys.argv[1]))
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Ranks without the seconds that importing a framework takes: a process that has imported it forks them.

mpirun starts a stand-in for each rank (``warm/stand_in.py``), which hands its arguments, environment, folder and
standard streams to that process, and passes signals on to the fork and its end back. To MPI the fork is the rank. All
forks share the seed of Python's hashes; otherwise they are what ranks that mpirun has started are.

    python -m tests.support.warm_ranks SOCKET FRAMEWORK
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.system.processes import die_with_parent

MODULES = {
    "torch": ("hpctrain.backends.torch.framework", "tests.tasks.torch_tasks"),
    "tensorflow": ("hpctrain.backends.tensorflow.task.opening", "tests.tasks.tensorflow_tasks"),
}
"""What is imported beforehand for programs of a framework."""
STAND_IN = Path(__file__).parent / "warm" / "stand_in.py"
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
"""Of linux/sched.h."""
COMMON = ("hpctrain.rank.wiring", "hpctrain.checkpoint.hook")
START_S = 240.0


@dataclass(frozen=True)
class Order:
    """What a stand-in asks for."""

    argv: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    streams: Sequence[int]


_PRELOADED: dict[str, Path] = {}
"""The socket of each such process, by framework: one each for all tests, whose variables differ by the test's name."""


def preloaded(framework: str, environment: Mapping[str, str]) -> Path:
    """The socket of a process that has imported a framework; it is started once, and ends with this one."""
    if framework not in _PRELOADED:
        _PRELOADED[framework] = _started(framework, environment)
    return _PRELOADED[framework]


def _started(framework: str, environment: Mapping[str, str]) -> Path:
    path = Path(tempfile.mkdtemp(prefix="ranks-")) / "socket"
    words = [sys.executable, "-m", "tests.support.warm_ranks", str(path), framework]
    parent = subprocess.Popen(words, env=environment, cwd=path.parent, stdin=subprocess.DEVNULL, start_new_session=True)
    atexit.register(end, parent, path.parent)
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert parent.poll() is None and time.monotonic() < deadline, f"{' '.join(words)} does not start"
        time.sleep(0.05)
    return path


def end(parent: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends such a process."""
    parent.kill()
    parent.wait()
    shutil.rmtree(folder)


def command(framework: str, environment: Mapping[str, str]) -> list[str]:
    """What mpirun starts in place of Python, before the program and its arguments."""
    path = preloaded(framework, environment)
    return [sys.executable, "-I", "-S", str(STAND_IN), str(path)]


def variables(framework: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which `hpctrain run` has such ranks, whatever its own way of starting them, and `train` is one."""
    path = preloaded(framework, environment)
    search = f"{STAND_IN.parent}{os.pathsep}{environment['PYTHONPATH']}"
    return {"WARM_RANKS": str(path), "PYTHONPATH": search}


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
                    if order is None:
                        asking.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        _join(asking)
                        _forget([listener, asking, *ranks.values()], [ended, note])
                        return order
                    for stream in order.streams:
                        os.close(stream)
                    ranks[pid] = asking
                    events.register(asking, selectors.EVENT_READ, pid)
                    with contextlib.suppress(OSError):  # a stand-in that is gone shows at the next look
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


def _read(asking: socket.socket) -> Order | None:
    """What a stand-in asks for; None if it has ended before it had asked."""
    streams: list[int] = []
    try:
        text, streams, _, _ = socket.recv_fds(asking, 1 << 16, 3)
        while not text.endswith(b"\n"):
            if not (more := asking.recv(1 << 16)):
                raise EOFError
            text += more
    except (OSError, EOFError):
        for stream in streams:
            os.close(stream)
        return None
    argv, folder, environment = json.loads(text)
    return Order(argv, folder, environment, streams)


def _reap() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _join(asking: socket.socket) -> None:
    """Makes this process one of the stand-in's host, if that has a network and a name of its own (see ``netns``)."""
    peer, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    for kind, flag in (("net", CLONE_NEWNET), ("uts", CLONE_NEWUTS)):
        theirs = f"/proc/{peer}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(theirs, "rb") as opened:
                assert ctypes.CDLL(None).setns(opened.fileno(), flag) == 0, f"{theirs} cannot be entered"


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
    importlib.import_module("numpy").random.seed()


def run(argv: Sequence[str]) -> None:
    """A program, as ``python FILE ...`` or ``python [-P] -m MODULE ...`` would."""
    if "-m" in argv[:2]:
        begin = argv.index("-m") + 1
        sys.path[:1] = [] if argv[0] == "-P" else [os.getcwd()]
        sys.argv = list(argv[begin:])
        runpy.run_module(argv[begin], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    die_with_parent()
    for module in (*COMMON, *MODULES[sys.argv[2]]):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in the forks leave these objects, and the pages they lie in, alone
    asked = serve(sys.argv[1])
    become(asked)
    run(asked.argv)

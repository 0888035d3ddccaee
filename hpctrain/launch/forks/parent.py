"""The process that imports what ranks need, then forks a rank for each stand-in that asks.

    python -P -m hpctrain.launch.forks.parent SUPERVISOR MODULES WORDS

Standard input is the listening socket. SUPERVISOR is the supervisor's process ID. MODULES are separated by commas.
WORDS is a rank's command line: ps shows what the process is for, and each fork overwrites it with its own command. A
fork differs from a process started by mpirun in two ways: all forks share one hash seed, and have more modules loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch.forks.stand_in import LONGEST, READY
from hpctrain.system.keras_backend import keras_backend
from hpctrain.system.processes import die_with_parent

READING_S = 10.0
"""Timeout for receiving a request."""
FORK_SAFE = {"jemalloc_bg_thd"}
"""Names of threads whose libraries restart them after a fork: that of Arrow's allocator."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class Request:
    """A stand-in's request for a rank."""

    argv: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    umask: int
    stand_in: int
    """Process ID of the stand-in."""
    streams: Sequence[int]


def main(supervisor: str, modules: str) -> None:
    """Imports the modules and serves stand-ins; each fork returns from ``serve`` and runs a rank."""
    die_with_parent()
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    if os.getppid() != int(supervisor):  # it died before die_with_parent took effect
        return
    prepare(modules.split(","))
    if (request := serve(listener)) is not None:
        become(request)
        run(request.argv)


def prepare(modules: Sequence[str]) -> None:
    """Imports the modules that all ranks need."""
    os.environ["KERAS_BACKEND"] = keras_backend()  # as in ranks; Keras reads it when it is imported
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # garbage collection in forks then leaves these objects, and their shared pages, untouched


def may_fork() -> bool:
    """Whether this process can fork safely: it may have no other threads, since a fork does not inherit them.

    Forks once before counting, because some libraries (OpenBLAS) stop their threads at the first fork.
    """
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    return {task.read_text().strip() for task in tasks} <= FORK_SAFE


def serve(listener: socket.socket) -> Request | None:
    """Forks a rank for each stand-in. Returns its request in the fork; returns None if this process cannot fork."""
    if not may_fork():
        return None
    parent, ranks = os.getpid(), dict[int, socket.socket]()
    ended, note = socket.socketpair()
    note.setblocking(False)
    signal.set_wakeup_fd(note.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([listener, ended, *ranks.values()], [], [])
        if listener in ready:
            asking, _ = listener.accept()
            if (request := read(asking)) is None:
                asking.close()
            elif (pid := os.fork()) == 0:
                die_with_parent()
                if os.getppid() != parent:
                    os._exit(1)
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (listener, asking, ended, note, *ranks.values()):
                    each.close()
                return request
            else:
                with contextlib.suppress(OSError):  # the child has done so itself, or ended
                    os.setpgid(pid, pid)
                for stream in request.streams:
                    os.close(stream)
                ranks[pid] = asking
                answer(asking, pid)
        for pid, stand_in in list(ranks.items()):
            if stand_in in ready:  # the stand-in sends nothing after its request, so it has ended
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                ranks.pop(pid).close()
        if ended in ready:
            ended.recv(4096)
            for pid, status in reap():
                if (waiting := ranks.pop(pid, None)) is not None:
                    answer(waiting, status)
                    waiting.close()


def read(asking: socket.socket) -> Request | None:
    """Reads a stand-in's request; None if the stand-in has ended or given up."""
    try:
        asking.settimeout(READING_S)
        asking.sendall(READY)
        text, streams, _, _ = socket.recv_fds(asking, LONGEST, 3)
        return Request(*[*json.loads(text), streams]) if text else None
    except OSError:
        return None


def answer(asking: socket.socket, number: int) -> None:
    """Sends a number to a stand-in. If it is gone, the next ``select`` shows that."""
    with contextlib.suppress(OSError):
        asking.sendall(b"%d" % number)


def reap() -> Iterator[tuple[int, int]]:
    """Yields (process ID, wait status) of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def become(request: Request) -> None:
    """Sets this process up as if Python had just started in the stand-in's place: streams, environment, limits."""
    for descriptor, stream in enumerate(request.streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    os.umask(request.umask)
    with contextlib.suppress(OSError, ValueError):  # a limit that may not be raised stays as the parent has it
        os.sched_setaffinity(0, os.sched_getaffinity(request.stand_in))
        for limit in LIMITS:
            resource.setrlimit(limit, resource.prlimit(request.stand_in, limit))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, request.stand_in))
    show([sys.executable, *request.argv])
    importlib.import_module("numpy").random.seed()  # Python reseeds its own generator at each fork


def show(words: Sequence[str]) -> None:
    """Overwrites this process's command line, so that ps shows these words."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    if 0 < begin < end:
        text = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def run(argv: Sequence[str]) -> None:
    """Runs a program as ``python FILE ...`` or ``python [-P] -m MODULE ...`` would."""
    if "-m" in argv[:2]:
        begin = list(argv).index("-m") + 1
        sys.path[:0] = [] if argv[0] == "-P" else [os.getcwd()]
        sys.argv[:] = argv[begin:]
        runpy.run_module(argv[begin], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = argv
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:3])

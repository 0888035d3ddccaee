"""The process that has imported what ranks import, and forks one for each stand-in that asks.

    python -P -m hpctrain.launch.forks.parent SUPERVISOR MODULES WORDS

Its standard input is the socket at which it listens. MODULES are separated by commas. WORDS are a rank's: they say what
it is for, and ps shows those of each fork in their place. A fork differs from a process that mpirun has started in the
seed of Python's hashes, which all forks share, and in what it has imported.
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
from hpctrain.system.processes import die_with_parent

READING_S = 10.0
"""Longest wait for an order."""
FORK_SAFE = {"jemalloc_bg_thd"}
"""Threads of libraries that begin them again in forks: Arrow's allocator."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class Order:
    """What a stand-in asks for."""

    argv: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    umask: int
    stand_in: int
    """Its process."""
    streams: Sequence[int]


def main(supervisor: str, modules: str) -> None:
    """Imports, serves, and becomes a rank in each fork."""
    die_with_parent()
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    if os.getppid() != int(supervisor):  # it died before that
        return
    prepare(modules.split(","))
    if (order := serve(listener)) is not None:
        become(order)
        run(order.argv)


def prepare(modules: Sequence[str]) -> None:
    """Imports what all ranks will."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # as in ranks; Keras reads it when it is imported
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in the forks leave these objects, and the pages they lie in, alone


def may_fork() -> bool:
    """Whether forks are whole: threads do not come along. Some libraries end theirs at the first fork (OpenBLAS)."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    return {task.read_text().strip() for task in tasks} <= FORK_SAFE


def serve(listener: socket.socket) -> Order | None:
    """Forks a rank for each stand-in; returns in the fork, or None if this process cannot fork."""
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
            if (order := read(asking)) is None:
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
                return order
            else:
                with contextlib.suppress(OSError):  # it has done so itself, or ended
                    os.setpgid(pid, pid)
                for stream in order.streams:
                    os.close(stream)
                ranks[pid] = asking
                answer(asking, pid)
        for pid, stand_in in list(ranks.items()):
            if stand_in in ready:  # it has ended: it says nothing more
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                ranks.pop(pid).close()
        if ended in ready:
            ended.recv(4096)
            for pid, status in reap():
                if (waiting := ranks.pop(pid, None)) is not None:
                    answer(waiting, status)
                    waiting.close()


def read(asking: socket.socket) -> Order | None:
    """What a stand-in asks for; None if it has ended before that, or no longer waits."""
    try:
        asking.settimeout(READING_S)
        asking.sendall(READY)
        text, streams, _, _ = socket.recv_fds(asking, LONGEST, 3)
        return Order(*[*json.loads(text), streams]) if text else None
    except OSError:
        return None


def answer(asking: socket.socket, number: int) -> None:
    """Tells a stand-in; one that is gone shows at the next look."""
    with contextlib.suppress(OSError):
        asking.sendall(b"%d" % number)


def reap() -> Iterator[tuple[int, int]]:
    """Children that have ended, and how."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def become(order: Order) -> None:
    """Makes this process what Python is at the start of a program in the stand-in's place."""
    for descriptor, stream in enumerate(order.streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    os.umask(order.umask)
    with contextlib.suppress(OSError, ValueError):  # what is not allowed to be raised stays as the parent has it
        os.sched_setaffinity(0, os.sched_getaffinity(order.stand_in))
        for limit in LIMITS:
            resource.setrlimit(limit, resource.prlimit(order.stand_in, limit))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, order.stand_in))
    show([sys.executable, *order.argv])
    importlib.import_module("numpy").random.seed()  # Python's own generator does so at each fork


def show(words: Sequence[str]) -> None:
    """Has ps show these words for this process, in the place of those that it was started with."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    if 0 < begin < end:
        text = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def run(argv: Sequence[str]) -> None:
    """A program, as ``python FILE ...`` or ``python [-P] -m MODULE ...`` would."""
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

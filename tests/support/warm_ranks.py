"""Ranks that start quickly, because they are forked from a process that has already imported the framework.

It is the parent process of ``hpctrain.launch.forks``, which has also imported what the tests' tasks need, shared by all
tests. Its ranks may be on hosts that are network namespaces. Runs that use it start no parent of their own.
Nodes of the tests' Slurm also have their own process IDs: a fork that has entered a node, given its INIT, serves there.

    python -P -m tests.support.warm_ranks SOCKET FRAMEWORK [INIT]
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from hpctrain.launch.forks.forking import BACKENDS, COMMON, FORKS, STAND_IN
from hpctrain.launch.forks.parent import become, prepare, run, serve
from hpctrain.system.processes import die_with_parent

WARM = Path(__file__).parent / "warm"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
"""From linux/sched.h."""
START_S = 240.0


SOCKET = "SOCKET_OF_WARM_"
"""Beginning of the names of variables with pids and sockets of parent processes, which xdist's workers inherit."""


def preloaded(framework: str, environment: Mapping[str, str]) -> Path:
    """Socket of a process that has imported a framework, by framework only: tests' environments differ, if only by the
    test's name."""
    if SOCKET + framework not in os.environ:
        start(framework, environment)
    pid, _, socket_ = os.environ[SOCKET + framework].partition(" ")
    path, deadline = Path(socket_), time.monotonic() + START_S
    while not path.exists():
        is_running = psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
        assert is_running and time.monotonic() < deadline, f"the process that forks ranks of {framework} does not start"
        time.sleep(0.05)
    return path


def start(framework: str, environment: Mapping[str, str]) -> None:
    """Start the parent process of a framework; it ends with this process."""
    path = Path(tempfile.mkdtemp(prefix="ranks-")) / "socket"
    environment = {**environment, "OMP_NUM_THREADS": "1"}  # read at import, so that forks cannot change it
    words = [sys.executable, "-P", "-m", "tests.support.warm_ranks", str(path), framework]
    parent = subprocess.Popen(words, env=environment, cwd=path.parent, stdin=subprocess.DEVNULL, start_new_session=True)
    os.environ[SOCKET + framework] = f"{parent.pid} {path}"
    atexit.register(end, parent, path.parent)


def end(parent: subprocess.Popen[bytes], folder: Path) -> None:
    """End a parent process and remove its folder."""
    parent.kill()
    parent.wait()
    shutil.rmtree(folder)


def command(framework: str, environment: Mapping[str, str]) -> list[str]:
    """Command that mpirun starts instead of Python, followed by the program and its arguments."""
    path = preloaded(framework, environment)
    return [sys.executable, "-I", "-S", str(STAND_IN), str(path)]


def variables(framework: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which `hpctrain train`, and ranks of `hpctrain run` however started, are forks of the process."""
    path = preloaded(framework, environment)
    return {"WARM_RANKS": str(path), "PYTHONPATH": f"{WARM}{os.pathsep}{environment['PYTHONPATH']}", FORKS: "0"}


def _join(pid: int, **namespaces: int) -> None:
    """Move this process to another one's namespaces, as far as they differ (see ``netns``); mnt last: it has /proc."""
    for kind, flag in namespaces.items():
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(theirs, "rb") as opened:
                assert ctypes.CDLL(None).setns(opened.fileno(), flag) == 0, f"{theirs} cannot be entered"


def _enter(init: int) -> None:
    """Continue on a node, in a child: a process keeps its ID, and the namespace of that. This process waits for it."""
    _join(init, uts=CLONE_NEWUTS, pid_for_children=CLONE_NEWPID, mnt=CLONE_NEWNS)
    if child := os.fork():
        os._exit(os.waitpid(child, 0)[1] != 0)


def forget(shared: list[str]) -> None:
    """At a fork's end, leave modules that it shares with its parent whole: taking them apart copies all their pages."""
    kept = [sys.modules.pop(name, None) for name in shared]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def main(path: str, framework: str, init: str = "") -> None:
    """Serve requests; each fork becomes a rank."""
    if init:
        _enter(int(init))
    die_with_parent()
    shared: list[str] = []
    atexit.register(forget, shared)  # first, so that it is called last
    prepare([*COMMON, BACKENDS[framework], "hpctrain.checkpoint.hook", f"tests.tasks.{framework}_tasks"])
    shared += sys.modules.keys() - {"__main__", "builtins", "sys"}
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)  # nor takes a fork apart what libraries have loaded: 0.3 s of processor
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)
        order = serve(listener)
    assert order is not None, "this process cannot fork"
    _join(order.stand_in, net=CLONE_NEWNET, uts=CLONE_NEWUTS)
    become(order)
    # By lines, each whole: PYTHONUNBUFFERED's loses the rest of what a signal cuts off while a pipe is full.
    lines = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(lines, encoding="utf-8", line_buffering=True)
    run(order.argv)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What mpirun starts in place of a rank: ``stand_in.py SOCKET``, and the words of Python's for the rank.

It must start quickly, so it uses the standard library only.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1
READY = b"ready"
LONGEST = 1 << 22
"""Bytes of an order: a process's arguments and environment have two million at most, and JSON escapes some."""
ANSWER_S = 600.0
"""Longest wait for the imports of the parent: those of ranks would not be faster, even from a slow disk."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main(path: str, *words: str) -> NoReturn:
    """Has the rank forked, and ends as it does; with its launcher if the rank would."""
    if "HPCTRAIN_TETHER" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        parent = ordered(path, words)
    except OSError as error:
        os.write(2, f"hpctrain: this rank is not forked but started: {error}\n".encode())
        os.execv(sys.executable, [sys.executable, *words])
    pid = int(parent.recv(64) or end(signal.SIGKILL))
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    end(int(parent.recv(64) or signal.SIGKILL))


def ordered(path: str, words: Sequence[str]) -> socket.socket:
    """A connection to the parent, which has imported all and knows what to fork. Raises OSError: it will not do so."""
    parent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent.settimeout(ANSWER_S)
    parent.connect(path)
    if parent.recv(64) != READY:
        raise ConnectionError("the process that would fork it has ended")
    mask = os.umask(0)
    os.umask(mask)
    order = json.dumps([words, os.getcwd(), dict(os.environ), mask, os.getpid()]).encode()
    parent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(order))
    socket.send_fds(parent, [order], [0, 1, 2])  # as a whole, or not at all
    parent.settimeout(None)
    return parent


def end(status: int) -> NoReturn:
    """Ends as the rank has, of which the core is its own."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(*sys.argv[1:])

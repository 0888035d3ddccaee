"""The program that mpirun starts in place of a rank: ``stand_in.py SOCKET``, then the rank's arguments to Python.

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
"""Largest request in bytes: arguments and environment take at most 2 MB, plus JSON escapes."""
ANSWER_S = 600.0
"""Timeout for the parent's imports; a rank's own imports would not be faster, even from a slow disk."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main(path: str, *words: str) -> NoReturn:
    """Asks the parent to fork the rank, forwards signals to it, and exits with its status.

    Becomes the rank itself if the parent cannot fork it. Dies with the launcher if the rank would.
    """
    if "HPCTRAIN_TETHER" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        parent = requested(path, words)
    except OSError as error:
        os.write(2, f"hpctrain: this rank is not forked but started: {error}\n".encode())
        os.execv(sys.executable, [sys.executable, *words])
    pid = int(parent.recv(64) or end(signal.SIGKILL))
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    end(int(parent.recv(64) or signal.SIGKILL))


def requested(path: str, words: Sequence[str]) -> socket.socket:
    """Sends the request to the parent once it has finished its imports; returns the connection.

    Raises:
        OSError: the parent is gone, does not answer, or refuses.
    """
    parent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent.settimeout(ANSWER_S)
    parent.connect(path)
    if parent.recv(64) != READY:
        raise ConnectionError("the process that would fork it has ended")
    mask = os.umask(0)
    os.umask(mask)
    request = json.dumps([words, os.getcwd(), dict(os.environ), mask, os.getpid()]).encode()
    parent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(request))
    socket.send_fds(parent, [request], [0, 1, 2])  # one packet: sent whole or not at all
    parent.settimeout(None)
    return parent


def end(status: int) -> NoReturn:
    """Ends this process with the rank's wait status, without a core dump: the rank has written its own."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(*sys.argv[1:])

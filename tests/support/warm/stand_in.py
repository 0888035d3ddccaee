"""What mpirun starts in place of a rank: ``stand_in.py SOCKET PROGRAM ARGUMENTS``. See ../warm_ranks.py."""

import ctypes
import json
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def main(path, *argv):
    """Has the rank forked, and ends as it does; with its launcher if the rank would."""
    if "HPCTRAIN_TETHER" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = socket.socket(socket.AF_UNIX)
    parent.connect(path)
    order = json.dumps([argv, os.getcwd(), dict(os.environ)]).encode() + b"\n"
    sent = socket.send_fds(parent, [order], [0, 1, 2])
    parent.sendall(order[sent:])
    answer = parent.makefile()
    pid = int(answer.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    status = int(answer.readline() or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(*sys.argv[1:])

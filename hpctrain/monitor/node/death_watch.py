"""A process that only notes which of a node's ranks dies, and when.

The agent runs at low priority so as not to disturb the ranks. But the first death must be recorded before the launcher,
which notices it too, has ended every process of the job, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time

from hpctrain.monitor.node.node import Node
from hpctrain.monitor.shared import FINISHED, JOINING, PID, STATE
from hpctrain.run.last_words import note_death
from hpctrain.system.processes import GONE, exit_code_of, is_ending, look

ENDING_S = 1.0
"""Longest wait for a rank that the kernel is ending: its connections close first, so a victim can end before it."""
PAUSE_S = 0.001
"""Seconds between two looks at it."""


def start(node: Node) -> None:
    """Forks the process; call it before there are threads.

    It closes inherited descriptors only once it knows its ranks, so waiting for a pipe of the agent to close also waits
    for the watch. It ends with the ranks, or with the agent if the ranks have finished but their processes are alive.
    """
    with contextlib.suppress(OSError):  # no more processes permitted: rely on the launcher's messages
        agent, _ = os.pipe()  # the other end closes with the agent
        if os.fork() == 0:
            try:
                watch(node, agent)
            finally:
                os._exit(0)
        os.close(agent)


def watch(node: Node, agent: int) -> None:
    """Notes deaths until every rank that the agent watches has ended.

    A launcher that ends a job kills the node's ranks and the agent at once. So a death that is noted while these live
    is not its doing, however late it is noted.

    Args:
        node: the ranks' node.
        agent: a descriptor that becomes readable when the agent ends.
    """
    lives = {life: pid for pid, life in node.lives.items() if life >= 0}
    alive = {**lives, agent: os.getppid()}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in lives and descriptor != agent:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(descriptor)
    dead = [pid for pid, life in node.lives.items() if life < 0 and look(pid, 0) == GONE]  # before the agent began
    for pid in dead:
        note(node, pid, None, len(dead) == 1 and not any(map(is_ending, alive.values())))
    with selectors.DefaultSelector() as selector:
        for descriptor in alive:
            selector.register(descriptor, selectors.EVENT_READ)
        while lives:
            ended = take(selector)
            last = time.monotonic() + ENDING_S
            ending = True
            while ending and time.monotonic() < last:
                ending = any(is_ending(pid) for fd, pid in alive.items() if fd not in ended)
                ended += take(selector, PAUSE_S if ending else 0)  # whoever ended and was reaped before that look
            codes = {fd: exit_code_of(lives[fd], fd) for fd in ended if fd in lives}
            alone = len(ended) == 1 and not ending
            for fd in sorted(ended, key=lambda fd: is_victim(codes.get(fd))):
                del alive[fd]
                if fd in lives:
                    note(node, lives.pop(fd), codes[fd], alone)
                elif fd == agent:
                    lives = {life: pid for life, pid in lives.items() if not has_finished(node, pid)}


def take(selector: selectors.BaseSelector, timeout_s: float | None = None) -> list[int]:
    """Returns the descriptors that have become readable, in that order, and stops to watch them."""
    found = [key.fd for key, _ in selector.select(timeout_s)]
    for descriptor in found:
        selector.unregister(descriptor)
    return found


def is_victim(code: int | None) -> bool:
    """Whether a rank that ends at the same time as others ended because of them.

    A rank that loses a peer exits, and the launcher ends the rest with SIGTERM; other signals are causes.
    """
    return code is None or code >= 0 or code == -signal.SIGTERM


def has_finished(node: Node, pid: int) -> bool:
    """Whether every rank of a process has finished in an orderly way."""
    return all(head[STATE] == FINISHED for head in node.reader.heads() if int(head[PID]) == pid)


def note(node: Node, pid: int, code: int | None, alone: bool) -> None:
    """Records the death of a rank, unless it had not joined or had finished. See ``NotedDeath``."""
    for rank, head in zip(node.ranks, node.reader.heads(), strict=True):
        if int(head[PID]) == pid and head[STATE] not in (JOINING, FINISHED):
            note_death(int(rank), code, alone)

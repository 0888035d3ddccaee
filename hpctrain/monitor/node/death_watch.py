"""A process that notes which of a node's ranks dies when, and does nothing else.

The agent has a low priority, so that its arithmetic is not in the ranks' way. But who died first must be written down
before a launcher, which hears of it too, has ended every process of the job: that takes it milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import selectors

from hpctrain.monitor.node.node import Node
from hpctrain.monitor.shared import FINISHED, JOINING, PID, STATE
from hpctrain.run import deaths


def start(node: Node) -> None:
    """Forks it, before there are threads; it ends with the ranks. Whoever waits for a file to close has it in place."""
    with contextlib.suppress(OSError):  # no more processes permitted: the launcher's words have to do
        if os.fork() == 0:
            try:
                watch(node)
            finally:
                os._exit(0)


def watch(node: Node) -> None:
    """Notes deaths until every rank of the node that the agent has in sight has ended."""
    lives = {life: pid for pid, life in node.lives.items() if life >= 0}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in lives:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(descriptor)
    with selectors.DefaultSelector() as selector:
        for life in lives:
            selector.register(life, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fd)
                note(node, lives[key.fd])


def note(node: Node, pid: int) -> None:
    """Writes down that a rank of the node has died, unless it had come to its end."""
    for rank, head in zip(node.ranks, node.reader.heads(), strict=True):
        if int(head[PID]) == pid and head[STATE] not in (JOINING, FINISHED):
            deaths.note(int(rank))

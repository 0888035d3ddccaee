"""The listening side: strangers are few, have little time, and never cost a descriptor that this run needs."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import Counter
from dataclasses import dataclass

from hpctrain.monitor.wire.connection import Connection
from hpctrain.system import address as system_address

ACCEPTED_AT_ONCE = 64
REST_S = 1.0
"""Pause after the system has refused to give a descriptor."""


@dataclass(frozen=True)
class DoorLimits:
    """How much strangers may cost."""

    strangers: int = 512
    """Connections without a proof, of all addresses."""
    strangers_of_address: int = 16
    """Of one address; later ones displace earlier ones."""
    patience_s: float = 10.0
    """Longest wait for a proof."""
    hurry_s: float = 1.0
    """The same while others wait for a place."""
    reserved_descriptors: int = 128
    """Descriptors that connections leave free: for looking at processes, for stacks, for files."""


class Door:
    """Accepts connections and keeps those whose peers have not proved themselves yet.

    Args:
        listener: non-blocking.
        token: the run's secret.
        descriptors: that this process may have open.
        limits: how much strangers may cost.
    """

    def __init__(self, listener: socket.socket, token: bytes, descriptors: int, limits: DoorLimits) -> None:
        self.listener = listener
        self.token = token
        self.descriptors = descriptors
        self.limits = limits
        self.strangers: dict[Connection, str] = {}
        """With their addresses; those who have waited longest come first."""
        self.of_address: Counter[str] = Counter()
        self.rests_until = 0.0

    def has_room(self, now: float, trusted: int) -> bool:
        """Whether to accept now, with ``trusted`` connections open; else newcomers wait in the kernel's queue."""
        left = self.descriptors - self.limits.reserved_descriptors - trusted
        return now >= self.rests_until and len(self.strangers) < min(self.limits.strangers, left)

    def accept(self, now: float, trusted: int) -> list[Connection]:
        """Takes newcomers as strangers."""
        fresh: list[Connection] = []
        while len(fresh) < ACCEPTED_AT_ONCE and self.has_room(now, trusted):
            try:
                stream, (address, *_) = self.listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.rests_until = now + REST_S
                break
            connection = Connection.over(stream, self.token, opened=now)
            self.strangers[connection] = address
            self.of_address[address] += 1
            fresh.append(connection)
        return fresh

    def forget(self, connection: Connection) -> None:
        """This one is a stranger no longer: it is trusted, or gone."""
        address = self.strangers.pop(connection, None)
        if address is not None:
            self.of_address[address] -= 1
            if not self.of_address[address]:
                del self.of_address[address]

    def overdue(self, now: float) -> list[Connection]:
        """Strangers who have had their time, or whom later ones from the same address displace."""
        crowded = len(self.strangers) >= self.limits.strangers
        patience_s = self.limits.hurry_s if crowded else self.limits.patience_s
        surplus = {address: count - self.limits.strangers_of_address for address, count in self.of_address.items()}
        late = []
        for connection, address in self.strangers.items():
            if surplus[address] > 0 or now - connection.opened > patience_s:
                surplus[address] -= 1
                late.append(connection)
        return late


def listen(address: str | None) -> socket.socket:
    """A socket for a door on a free port. See ``system.address.listen``."""
    listener = system_address.listen(address)
    listener.setblocking(False)
    return listener


def raise_descriptors() -> int:
    """Raises this process's limit of open files as far as it may; the limit."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return int(os.sysconf("SC_OPEN_MAX"))

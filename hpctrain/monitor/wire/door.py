"""The listening side. Peers without proof (strangers) are limited in number and time, and in descriptors."""

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
"""Pause after the system has run out of descriptors or memory."""


@dataclass(frozen=True)
class DoorLimits:
    """Limits for strangers."""

    strangers: int = 512
    """Connections without proof from all addresses."""
    strangers_of_address: int = 16
    """Connections without proof from one address; later ones displace earlier ones."""
    patience_s: float = 10.0
    """Longest wait for a proof."""
    hurry_s: float = 1.0
    """Longest wait for a proof while the limit of strangers is reached."""
    reserved_descriptors: int = 128
    """Descriptors kept free of connections, for process checks, stacks and files."""


class Door:
    """Accepts connections and holds those whose peers have not proved themselves yet.

    Args:
        listener: a non-blocking listening socket.
        token: the run's secret.
        descriptors: limit of open files of this process.
        limits: limits for strangers.
    """

    def __init__(self, listener: socket.socket, token: bytes, descriptors: int, limits: DoorLimits) -> None:
        self.listener = listener
        self.token = token
        self.descriptors = descriptors
        self.limits = limits
        self.strangers: dict[Connection, str] = {}
        """Their addresses, longest-waiting first."""
        self.of_address: Counter[str] = Counter()
        self.rests_until = 0.0

    def has_room(self, now: float, trusted: int) -> bool:
        """Whether to accept now, with ``trusted`` connections open; otherwise newcomers wait in the kernel's queue."""
        left = self.descriptors - self.limits.reserved_descriptors - trusted
        return now >= self.rests_until and len(self.strangers) < min(self.limits.strangers, left)

    def accept(self, now: float, trusted: int) -> list[Connection]:
        """Accepts new connections as strangers."""
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
        """Removes a connection that is now trusted or closed."""
        address = self.strangers.pop(connection, None)
        if address is not None:
            self.of_address[address] -= 1
            if not self.of_address[address]:
                del self.of_address[address]

    def overdue(self, now: float) -> list[Connection]:
        """Strangers whose time is up, or that later ones from the same address displace."""
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
    """Opens a non-blocking listening socket on a free port. See ``system.address.listen``."""
    listener = system_address.listen(address)
    listener.setblocking(False)
    return listener


def raise_descriptors() -> int:
    """Raises this process's limit of open files to the hard limit; returns the limit."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return int(os.sysconf("SC_OPEN_MAX"))

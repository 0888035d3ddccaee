"""Connections between agents that have proved to each other that they hold the token: streams of messages.

``Door`` is the listening side. Peers without proof (strangers) are limited in number and time, and in descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import Counter, deque
from dataclasses import dataclass

from hpctrain.monitor.framing import Message
from hpctrain.system import address as system_address
from hpctrain.system import channel
from hpctrain.system.channel import ProtocolError

MAGIC = b"hpctrain monitor 2\n"
HELLO_BYTES = len(MAGIC) + channel.NONCE_BYTES
GREETING_BYTES = HELLO_BYTES + channel.PROOF_BYTES
QUEUED_MESSAGES = 64
"""Messages queued for a slow peer; beyond this the oldest are dropped and counted."""
READ_BYTES = 1 << 18
"""Bytes read from a trusted peer at a time; from others only the greeting is read."""
UNANSWERED_S = 3
"""Seconds without an answer from the peer's kernel after which the connection is given up, as with a pulled cable. The
kernel of a host whose processes are all stopped still answers."""
ACCEPTED_AT_ONCE = 64
REST_S = 1.0
"""Pause after the system has run out of descriptors or memory."""
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Connection:
    """One side of a connection; made by `over` and `connect`.

    Until the peer has proved that it holds the token, only a greeting of fixed length is read and sent.

    Args:
        stream: a connected, non-blocking socket.
        token: the run's secret.
        hello: this side's greeting.
        calls: whether this side opened the connection.
        opened: time of opening on the caller's clock.
    """

    def __init__(self, stream: socket.socket, token: bytes, hello: bytes, calls: bool, opened: float) -> None:
        self.stream = stream
        self.token = token
        self.hello = hello
        self.calls = calls
        self.opened = opened
        self.ended = False
        """Whether the peer has closed it or does not belong to the run. `close` must still be called."""
        self.unreachable = False
        """Whether it has ended because the peer's host does not answer."""
        self.dropped = 0
        self.greeting = b""
        """The part of the peer's greeting received so far."""
        self.keys: channel.Keys | None = None
        self.sealer: channel.Sealer | None = None
        self.opener: channel.Opener | None = None
        """``sealer`` and ``opener`` are set once the peer has proved itself."""
        self.sending = hello
        self.queue: deque[bytes] = deque()

    @classmethod
    def over(cls, stream: socket.socket, token: bytes, calls: bool = False, opened: float = 0.0) -> Connection:
        """Starts a connection over a connected socket."""
        stream.setblocking(False)
        with contextlib.suppress(OSError, AttributeError):  # not TCP
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNANSWERED_S)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):  # seconds
                stream.setsockopt(socket.IPPROTO_TCP, option, 1)
        return cls(stream, token, new_hello(), calls, opened)

    def fileno(self) -> int:
        """The socket's descriptor, for select."""
        return self.stream.fileno()

    @property
    def trusted(self) -> bool:
        """Whether the peer has proved that it holds the token."""
        return self.sealer is not None

    @property
    def wants_to_send(self) -> bool:
        """Whether there is data that may be sent now."""
        return bool(self.sending or (self.trusted and self.queue))

    @property
    def has_unsent(self) -> bool:
        """Whether there is unsent data, including messages that wait for the peer's proof."""
        return bool(self.sending or self.queue)

    def send(self, message: Message) -> None:
        """Queues a message; drops the oldest one if the queue is full, and the message itself if it is too large."""
        content = message.encode()
        if len(content) > channel.LARGEST_FRAME:
            self.dropped += 1
            return
        if len(self.queue) >= QUEUED_MESSAGES:
            self.queue.popleft()
            self.dropped += 1
        self.queue.append(content)

    def flush(self) -> None:
        """Sends as much as the socket accepts."""
        try:
            while self.wants_to_send and not self.ended:
                if not self.sending and self.sealer is not None:
                    self.sending = self.sealer.seal(self.queue.popleft())
                self.sending = self.sending[self.stream.send(self.sending) :]
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(error)

    def receive(self) -> list[Message]:
        """Returns received messages. Sets ``ended`` if the peer closed the connection or is not of this run."""
        try:
            received = self.stream.recv(self._wanted())
        except BlockingIOError:
            return []
        except OSError as error:
            self.fail(error)
            return []
        if not received:
            self.ended = True
            return []
        try:
            if self.opener is not None:
                return [Message.decode(content) for content in self.opener.open(received)]
            self._greet(received)
        except ProtocolError:
            self.ended = True
        return []

    def fail(self, error: OSError) -> None:
        """Ends the connection because of a socket error."""
        self.ended, self.unreachable = True, error.errno in UNREACHABLE

    def _wanted(self) -> int:
        """Bytes to read: from an untrusted peer, at most the rest of the current part of its greeting."""
        if self.trusted:
            return READ_BYTES
        return (HELLO_BYTES if self.keys is None else GREETING_BYTES) - len(self.greeting)

    def _greet(self, received: bytes) -> None:
        """Answers a hello with a proof; trusts the peer after its proof."""
        self.greeting += received
        if self.keys is None and len(self.greeting) == HELLO_BYTES:
            if not self.greeting.startswith(MAGIC):
                raise ProtocolError("the peer does not speak the agent's protocol")
            self.keys = channel.derive(self.token, self.calls, self.hello, self.greeting)
            self.sending += self.keys.proof
        elif self.keys is not None and len(self.greeting) == GREETING_BYTES:
            channel.require_equal(self.greeting[HELLO_BYTES:], self.keys.expected)
            self.sealer, self.opener = channel.Sealer(self.keys.sending), channel.Opener(self.keys.receiving)

    def close(self) -> None:
        """Closes the connection."""
        self.ended = True
        self.stream.close()


def new_hello() -> bytes:
    """Makes one side's greeting: MAGIC and a nonce."""
    return MAGIC + channel.make_nonce()


def connect(addresses: list[str], port: int, token: bytes, now: float, timeout_s: float = 2.0) -> Connection | None:
    """Connects to the first address that answers; None if none does.

    Args:
        addresses: tried in this order.
        port: port at each address.
        token: the run's secret.
        now: current time on the caller's clock.
        timeout_s: longest wait for one address.
    """
    for address in addresses:
        with contextlib.suppress(OSError):
            stream = socket.create_connection((address, port), timeout=timeout_s)
            return Connection.over(stream, token, calls=True, opened=now)
    return None


@dataclass(frozen=True)
class DoorLimits:
    """Limits for strangers."""

    strangers: int = 512
    """Connections without proof from all addresses."""
    strangers_of_address: int = 16
    """Connections without proof from one address; later ones displace earlier ones."""
    patience_s: float = channel.GREETING_S
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
            fresh.append(connection)
        return fresh

    def forget(self, connection: Connection) -> None:
        """Removes a connection that is now trusted or closed."""
        self.strangers.pop(connection, None)

    def overdue(self, now: float) -> list[Connection]:
        """Strangers whose time is up, or that later ones from the same address displace."""
        crowded = len(self.strangers) >= self.limits.strangers
        patience_s = self.limits.hurry_s if crowded else self.limits.patience_s
        surplus = Counter(self.strangers.values())
        surplus.subtract(dict.fromkeys(surplus, self.limits.strangers_of_address))
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

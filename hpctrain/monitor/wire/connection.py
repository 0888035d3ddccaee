"""A non-blocking stream of messages between two agents that have shown each other that they hold the run's token."""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
from collections import deque

from hpctrain.monitor.wire import framing

QUEUED_MESSAGES = 64
"""Messages that wait for a slow peer; older ones are dropped and counted."""
READ_BYTES = 1 << 18
"""Bytes that are taken from a trusted peer at a time; from others only those of the greeting."""
UNANSWERED_S = 3
"""The kernel gives up a connection whose other side's kernel has answered nothing for this long: a pulled cable. That
of a host whose processes are all stopped does answer."""
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Connection:
    """One side of a connection; `over` and `connect` make them.

    Nothing but a greeting of known length is read from a peer before it has proved itself, and nothing else is sent.

    Args:
        stream: connected, non-blocking.
        token: the run's secret.
        hello: what this side greets with.
        calls: this side opened the connection.
        opened: when, on the caller's clock.
    """

    def __init__(self, stream: socket.socket, token: bytes, hello: bytes, calls: bool, opened: float) -> None:
        self.stream = stream
        self.token = token
        self.hello = hello
        self.calls = calls
        self.opened = opened
        self.ended = False
        """The peer has closed it, or does not belong to the run. `close` is still to be called."""
        self.unreachable = False
        """It has ended because the peer's host does not answer."""
        self.dropped = 0
        self.greeting = b""
        """Of the peer, as far as it has come."""
        self.keys: framing.Keys | None = None
        self.sealer: framing.Sealer | None = None
        self.opener: framing.Opener | None = None
        """These two exist from the peer's proof on."""
        self.sending = hello
        self.queue: deque[bytes] = deque()

    @classmethod
    def over(cls, stream: socket.socket, token: bytes, calls: bool = False, opened: float = 0.0) -> Connection:
        """Begins to talk over a connected socket."""
        stream.setblocking(False)
        with contextlib.suppress(OSError, AttributeError):  # no TCP
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNANSWERED_S)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):  # seconds
                stream.setsockopt(socket.IPPROTO_TCP, option, 1)
        return cls(stream, token, framing.new_hello(), calls, opened)

    def fileno(self) -> int:
        """For select."""
        return self.stream.fileno()

    @property
    def trusted(self) -> bool:
        """The peer has proved that it holds the token."""
        return self.sealer is not None

    @property
    def wants_to_send(self) -> bool:
        """Something waits that may be sent now."""
        return bool(self.sending or (self.trusted and self.queue))

    @property
    def has_unsent(self) -> bool:
        """Something waits, perhaps for the peer's proof."""
        return bool(self.sending or self.queue)

    def send(self, message: framing.Message) -> None:
        """Queues a message; drops the oldest one if the peer does not keep up."""
        content = message.encode()
        if len(content) > framing.LARGEST_FRAME:
            self.dropped += 1
            return
        if len(self.queue) >= QUEUED_MESSAGES:
            self.queue.popleft()
            self.dropped += 1
        self.queue.append(content)

    def flush(self) -> None:
        """Sends what the socket takes."""
        try:
            while self.wants_to_send and not self.ended:
                if not self.sending and self.sealer is not None:
                    self.sending = self.sealer.seal(self.queue.popleft())
                self.sending = self.sending[self.stream.send(self.sending) :]
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(error)

    def receive(self) -> list[framing.Message]:
        """What has arrived. Sets ``ended`` if the peer closed the connection or does not belong to the run."""
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
                return [framing.Message.decode(content) for content in self.opener.open(received)]
            self._greet(received)
        except framing.ProtocolError:
            self.ended = True
        return []

    def fail(self, error: OSError) -> None:
        """Takes note of what the kernel says of it."""
        self.ended, self.unreachable = True, error.errno in UNREACHABLE

    def _wanted(self) -> int:
        """Bytes to take: of a stranger's, the rest of the present part of its greeting."""
        if self.trusted:
            return READ_BYTES
        return (framing.HELLO_BYTES if self.keys is None else framing.HELLO_BYTES + framing.PROOF_BYTES) - len(
            self.greeting
        )

    def _greet(self, received: bytes) -> None:
        """Answers a hello with a proof; trusts after the peer's own."""
        self.greeting += received
        if self.keys is None and len(self.greeting) == framing.HELLO_BYTES:
            self.keys = framing.derive(self.token, self.calls, self.hello, self.greeting)
            self.sending += self.keys.proof
        elif self.keys is not None and len(self.greeting) == framing.HELLO_BYTES + framing.PROOF_BYTES:
            if not hmac.compare_digest(self.greeting[framing.HELLO_BYTES :], self.keys.expected):
                raise framing.ProtocolError("the peer does not hold this run's token")
            self.sealer, self.opener = framing.Sealer(self.keys.sending), framing.Opener(self.keys.receiving)

    def close(self) -> None:
        """Ends the connection."""
        self.ended = True
        self.stream.close()


def connect(addresses: list[str], port: int, token: bytes, now: float, timeout_s: float = 2.0) -> Connection | None:
    """Connects to the first address that answers; None if none does.

    Args:
        addresses: tried in this order.
        port: of all of them.
        token: the run's secret.
        now: on the caller's clock.
        timeout_s: longest wait for one address.
    """
    for address in addresses:
        with contextlib.suppress(OSError):
            stream = socket.create_connection((address, port), timeout=timeout_s)
            return Connection.over(stream, token, calls=True, opened=now)
    return None

"""Messages between the agents: a JSON header and float32 arrays in length-prefixed frames, with bounded queues."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRAME = struct.Struct("!II")
LARGEST_FRAME = 64 * 2**20
LARGEST_HELLO = 4096
QUEUED_FRAMES = 64
"""Frames that wait for a slow peer; older ones are dropped and counted."""


class ProtocolError(Exception):
    """The peer is not an agent of this run."""


@dataclass(frozen=True)
class Message:
    """What agents tell each other."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The frame."""
        shapes = {name: list(array.shape) for name, array in self.arrays.items()}
        header = json.dumps({"kind": self.kind, "fields": self.fields, "arrays": shapes}).encode()
        payload = b"".join(np.ascontiguousarray(array, dtype="<f4").tobytes() for array in self.arrays.values())
        return FRAME.pack(len(header), len(payload)) + header + payload

    @classmethod
    def decode(cls, header: bytes, payload: bytes) -> Message:
        """The inverse; raises ProtocolError."""
        try:
            parsed = json.loads(header)
            arrays, offset = {}, 0
            for name, shape in parsed["arrays"].items():
                count = int(np.prod(shape, dtype=np.int64))
                arrays[name] = np.frombuffer(payload, dtype="<f4", count=count, offset=offset).reshape(shape)
                offset += 4 * count
            return cls(str(parsed["kind"]), dict(parsed["fields"]), arrays)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"a frame cannot be read: {error}") from error


class Connection:
    """A non-blocking stream of messages that begins with a proof on both sides that they hold the run's token.

    Args:
        stream: connected socket; it is made non-blocking.
        token: the run's secret.
        calls: this side opened the connection. The sides' proofs differ, so that none can be handed back.
    """

    def __init__(self, stream: socket.socket, token: bytes, calls: bool = False) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.token = token
        self.calls = calls
        self.nonce = secrets.token_hex(16)
        self.trusted = False
        self.closed = False
        self.dropped = 0
        self.incoming = bytearray()
        self.sending = b""
        self.queue: deque[bytes] = deque()
        self.hellos: deque[bytes] = deque([Message("hello", {"nonce": self.nonce}).encode()])

    def fileno(self) -> int:
        """For select."""
        return self.stream.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Something waits that may be sent now."""
        return bool(self.sending or self.hellos or (self.trusted and self.queue))

    def send(self, message: Message) -> None:
        """Queues a message; drops the oldest one where the peer does not keep up."""
        if len(self.queue) >= QUEUED_FRAMES:
            self.queue.popleft()
            self.dropped += 1
        self.queue.append(message.encode())

    def flush(self) -> None:
        """Sends what the socket takes."""
        try:
            while self.wants_to_send:
                if not self.sending:
                    self.sending = self.hellos.popleft() if self.hellos else self.queue.popleft()
                self.sending = self.sending[self.stream.send(self.sending) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """Messages that have arrived. Closes the connection where the peer did, or does not belong to the run."""
        with contextlib.suppress(BlockingIOError):
            try:
                while chunk := self.stream.recv(1 << 20):
                    self.incoming += chunk
                    if len(self.incoming) > LARGEST_FRAME:
                        break
                else:
                    self.closed = True
            except BlockingIOError:
                raise
            except OSError:
                self.closed = True
        try:
            messages = [message for message in self.frames() if not self.greeted(message)]
        except ProtocolError:
            self.close()
            return []
        if self.closed:
            self.close()
        return messages

    def frames(self) -> list[Message]:
        """Cuts complete frames from what has come."""
        found: list[Message] = []
        while len(self.incoming) >= FRAME.size:
            header, payload = FRAME.unpack_from(self.incoming)
            if header + payload > (LARGEST_FRAME if self.trusted or found else LARGEST_HELLO):
                raise ProtocolError("a frame is too large")
            end = FRAME.size + header + payload
            if len(self.incoming) < end:
                break
            frame = bytes(self.incoming[FRAME.size : end])
            del self.incoming[:end]
            found.append(Message.decode(frame[:header], frame[header:]))
        return found

    def greeted(self, message: Message) -> bool:
        """Handles the greeting; False for messages of a trusted peer."""
        if message.kind == "hello" and not self.trusted:
            proof = self.proof(str(message.fields.get("nonce")), self.calls)
            self.hellos.append(Message("proof", {"proof": proof}).encode())
            return True
        if message.kind == "proof" and not self.trusted:
            expected = self.proof(self.nonce, not self.calls)
            self.trusted = hmac.compare_digest(ascii(message.fields.get("proof")), ascii(expected))
        if not self.trusted:
            raise ProtocolError("the peer does not hold this run's token")
        return message.kind == "proof"

    def proof(self, nonce: str, calls: bool) -> str:
        """What only a holder of the token can answer, on one side of the connection."""
        return hmac.new(self.token, ascii((calls, nonce)).encode(), hashlib.sha256).hexdigest()

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self.stream.close()


def connect(addresses: list[str], port: int, token: bytes, timeout_s: float = 2.0) -> Connection | None:
    """Connects to the first address that answers; None where none does."""
    for address in addresses:
        with contextlib.suppress(OSError):
            return Connection(socket.create_connection((address, port), timeout=timeout_s), token, calls=True)
    return None

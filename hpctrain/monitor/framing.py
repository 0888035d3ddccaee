"""Messages between agents, and authenticated frames that carry them over a byte stream.

Pure: bytes in, bytes out; ``connection`` handles sockets. Both sides start by sending a random nonce. From the run's
token and both nonces each derives four keys (HMAC-SHA256 with a label each, as in HKDF's expansion, RFC 5869): a proof
for the caller, a proof for the listener, and a key for the frames in each direction. A frame is its length with a tag,
then its content with a tag. Tags cover a frame counter, so no frame can be altered, injected, replayed, reordered,
dropped or reflected unnoticed. The length is verified before any content is buffered. Contents are not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("!I")


class ProtocolError(Exception):
    """The peer is not an agent of this run."""


@dataclass(frozen=True)
class Message:
    """A message: its kind, JSON fields and float32 arrays."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Encodes the message."""
        shapes = {name: list(array.shape) for name, array in self.arrays.items()}
        header = json.dumps({"kind": self.kind, "fields": self.fields, "arrays": shapes}).encode()
        payload = (np.ascontiguousarray(array, dtype="<f4").tobytes() for array in self.arrays.values())
        return b"".join((HEADER.pack(len(header)), header, *payload))

    @classmethod
    def decode(cls, content: bytes) -> Message:
        """The inverse of ``encode``.

        Raises:
            ProtocolError: the content is not an encoded message.
        """
        try:
            begin = HEADER.size + HEADER.unpack_from(content)[0]
            parsed = json.loads(content[HEADER.size : begin])
            arrays = {}
            for name, shape in parsed["arrays"].items():
                count = int(np.prod(shape, dtype=np.int64))
                arrays[name] = np.frombuffer(content, dtype="<f4", count=count, offset=begin).reshape(shape)
                begin += 4 * count
            return cls(str(parsed["kind"]), dict(parsed["fields"]), arrays)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
            raise ProtocolError(f"a message cannot be read: {error}") from error


MAGIC = b"hpctrain monitor 2\n"
NONCE_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = 32
TAG_BYTES = 16
LENGTH = struct.Struct("!I")
PREFIX_BYTES = LENGTH.size + TAG_BYTES
LARGEST_FRAME = 64 * 2**20
"""Largest message in bytes; a window of a node with a hundred ranks has one or two million at most."""


def new_hello() -> bytes:
    """Makes one side's greeting: MAGIC and a nonce."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class Keys:
    """One connection's keys, as seen from one side."""

    proof: bytes
    """Proof that this side sends."""
    expected: bytes
    """Proof expected from the peer."""
    sending: bytes
    receiving: bytes


def derive(token: bytes, calls: bool, own_hello: bytes, peer_hello: bytes) -> Keys:
    """Derives the keys of a connection.

    Args:
        token: the run's secret.
        calls: whether this side opened the connection.
        own_hello: greeting sent by this side.
        peer_hello: greeting received.

    Raises:
        ProtocolError: the peer speaks another protocol.
    """
    if not peer_hello.startswith(MAGIC):
        raise ProtocolError("the peer does not speak the agent's protocol")
    hellos = own_hello + peer_hello if calls else peer_hello + own_hello

    def key(purpose: bytes) -> bytes:
        return hmac.digest(token, purpose + b"\0" + hellos, "sha256")

    caller, listener = (key(b"caller proves"), key(b"caller sends")), (key(b"listener proves"), key(b"listener sends"))
    own, peer = (caller, listener) if calls else (listener, caller)
    return Keys(proof=own[0], expected=peer[0], sending=own[1], receiving=peer[1])


def tag(key: bytes, number: int, part: bytes, content: bytes) -> bytes:
    """Authentication tag of one part of frame ``number``."""
    return hmac.digest(key, struct.pack("!Q", number) + part + content, "sha256")[:TAG_BYTES]


class Sealer:
    """Makes the frames of one direction.

    Args:
        key: key of that direction.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.number = 0

    def seal(self, content: bytes) -> bytes:
        """Makes the next frame."""
        length = LENGTH.pack(len(content))
        before, after = (tag(self.key, self.number, *part) for part in ((b"length", length), (b"content", content)))
        self.number += 1
        return b"".join((length, before, content, after))


class Opener:
    """Reads the frames of one direction.

    Args:
        key: key of that direction.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.number = 0
        self.incoming = bytearray()
        self.awaited: int | None = None
        """Length of the content to come, once verified."""

    def open(self, received: bytes) -> list[bytes]:
        """Returns the contents of the frames that these bytes complete.

        Raises:
            ProtocolError: a frame is not the peer's next one, or is too large.
        """
        self.incoming += received
        contents = []
        while (content := self._next()) is not None:
            contents.append(content)
        return contents

    def _next(self) -> bytes | None:
        if self.awaited is None:
            if len(self.incoming) < PREFIX_BYTES:
                return None
            prefix = self._cut(PREFIX_BYTES)
            self._check(b"length", prefix[: LENGTH.size], prefix[LENGTH.size :])
            (self.awaited,) = LENGTH.unpack_from(prefix)
            if self.awaited > LARGEST_FRAME:
                raise ProtocolError("a frame is too large")
        if len(self.incoming) < self.awaited + TAG_BYTES:
            return None
        content, seal = self._cut(self.awaited), self._cut(TAG_BYTES)
        self._check(b"content", content, seal)
        self.number += 1
        self.awaited = None
        return content

    def _cut(self, size: int) -> bytes:
        """Removes and returns bytes from the front."""
        taken = bytes(self.incoming[:size])
        del self.incoming[:size]
        return taken

    def _check(self, part: bytes, content: bytes, seal: bytes) -> None:
        if not hmac.compare_digest(tag(self.key, self.number, part, content), seal):
            raise ProtocolError("a frame is not from the peer, or out of order")

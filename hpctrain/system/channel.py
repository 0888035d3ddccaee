"""How both sides of a connection prove that they hold the secret of one run; frames; limits. Pure: bytes in, bytes out.

Both sides start by sending a random nonce. From the secret and both nonces each derives four keys (HMAC-SHA256 with a
label each, as in HKDF's expansion, RFC 5869): a proof for the caller, a proof for the listener, and a key for the
frames in each direction. A recorded proof is useless in another connection, and one that is sent back proves nothing.

Three parts of hpctrain use it, each with its own kind of I/O: the monitor's agents (``monitor.connection``), copies of
snapshots (``checkpoint.replica``), and nodes of runners (``launch.runners.link``), whose connections are TLS.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass

NONCE_BYTES = PROOF_BYTES = 32
TAG_BYTES = 16
LENGTH = struct.Struct("!I")
PREFIX_BYTES = LENGTH.size + TAG_BYTES
LARGEST_FRAME = 64 * 2**20
LARGEST_MESSAGE = 1 << 20
"""Largest message that is not in a frame."""
GREETING_S = 10.0
"""Longest wait for the other side's proof."""


NO_KEY = "it does not hold the key of this run"


class ProtocolError(ConnectionError):
    """The other side does not belong to this run, or does not keep to the protocol."""


def make_nonce() -> bytes:
    """Makes a nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def digest(secret: bytes, purpose: bytes, about: bytes) -> bytes:
    """What only holders of the secret can compute."""
    return hmac.digest(secret, purpose + b"\0" + about, "sha256")


def require_equal(received: bytes, expected: bytes) -> None:
    """Raises ProtocolError unless the other side has sent the digest that holders of the secret send."""
    if not hmac.compare_digest(received, expected):
        raise ProtocolError(NO_KEY)


@dataclass(frozen=True)
class Keys:
    """One connection's keys, as seen from one side."""

    proof: bytes
    """Proof that this side sends."""
    expected: bytes
    """Proof expected from the other side."""
    sending: bytes
    receiving: bytes


def derive(secret: bytes, calls: bool, own: bytes, other: bytes, about: bytes = b"") -> Keys:
    """Derives the keys of a connection.

    Args:
        secret: the run's secret.
        calls: whether this side opened the connection.
        own: nonce sent by this side.
        other: nonce received.
        about: what both sides must also have seen, such as a certificate.
    """
    nonces = own + other if calls else other + own
    sides = (b"caller", b"listener") if calls else (b"listener", b"caller")
    (proof, sending), (expected, receiving) = (
        [digest(secret, side + b" " + does, nonces + about) for does in (b"proves", b"sends")] for side in sides
    )
    return Keys(proof, expected, sending, receiving)


def tag(key: bytes, number: int, part: bytes, content: bytes) -> bytes:
    """Authentication tag of one part of frame ``number``."""
    return hmac.digest(key, struct.pack("!Q", number) + part + content, "sha256")[:TAG_BYTES]


class Sealer:
    """Makes the frames of one direction: a length with a tag, then content with a tag. Contents are not encrypted.

    Tags cover a frame counter, so no frame can be altered, injected, replayed, reordered, dropped or reflected
    unnoticed.

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
    """Reads the frames of one direction. A length is verified before any content is buffered.

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
            ProtocolError: a frame is not the other side's next one, or is too large.
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
            (self.awaited,) = LENGTH.unpack(self._verified(b"length", LENGTH.size))
            if self.awaited > LARGEST_FRAME:
                raise ProtocolError("a frame is too large")
        if len(self.incoming) < self.awaited + TAG_BYTES:
            return None
        content = self._verified(b"content", self.awaited)
        self.number += 1
        self.awaited = None
        return content

    def _verified(self, part: bytes, size: int) -> bytes:
        """Removes and returns a part of this size from the front, with its tag behind it."""
        content = bytes(self.incoming[:size])
        seal = bytes(self.incoming[size : size + TAG_BYTES])
        del self.incoming[: size + TAG_BYTES]
        if not hmac.compare_digest(tag(self.key, self.number, part, content), seal):
            raise ProtocolError("a frame is not from the other side, or out of order")
        return content

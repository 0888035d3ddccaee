"""The protocol between supervisor and node: messages over TLS, after each has proved that it holds the run's key.

The certificate is made for one run and signed by no authority. Instead the proofs of ``system.channel`` cover the
certificate that each side sees: a man in the middle would have to show the node another one.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
import struct
from enum import IntEnum
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.system.channel import (
    LARGEST_MESSAGE,
    NO_KEY,
    NONCE_BYTES,
    Keys,
    ProtocolError,
    derive,
    digest,
    make_nonce,
    require_equal,
)

NOBODY = bytes(NONCE_BYTES)
"""Answer to a knock with the wrong key."""
HEAD = struct.Struct("!BII")
"""Header of a message: kind, number of the command, bytes of content."""
BEAT_S = 1.0
SILENCE_S = 5.0
"""Silence after which the other side counts as lost."""


class MessageKind(IntEnum):
    """Kind of a message. The first three are forwarded to the ``ask`` process."""

    EXIT = 0
    """A command has ended; its exit code."""
    OUT = 1
    ERR = 2
    RUN = 3
    """Start a command line."""
    STOP = 4
    """End a command."""
    HELLO = 5
    """A node's first message: facts about it, as JSON."""
    BEAT = 6
    LEAVE = 7
    """The run is over."""
    GOING = 8
    """The node's machine is going to be taken away."""


class Lost(Exception):
    """The other side has disconnected or is silent."""


class Link:
    """One side of a connection between supervisor and node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, kind: MessageKind, number: int = 0, content: bytes = b"") -> None:
        """Queues a message."""
        self.writer.write(HEAD.pack(kind, number, len(content)) + content)

    async def receive(self) -> tuple[MessageKind, int, bytes]:
        """Returns the next message other than BEAT: kind, number, content. Raises Lost."""
        try:
            while True:
                head = await asyncio.wait_for(self.reader.readexactly(HEAD.size), SILENCE_S)
                kind, number, length = HEAD.unpack(head)
                if length > LARGEST_MESSAGE:
                    raise Lost("a message is too long")
                content = await asyncio.wait_for(self.reader.readexactly(length), SILENCE_S) if length else b""
                if kind != MessageKind.BEAT:
                    return MessageKind(kind), number, content
        except TimeoutError as error:
            raise Lost(f"it has been silent for {SILENCE_S:.0f} s") from error
        except EOFError as error:
            raise Lost("the connection has ended") from error
        except (OSError, ValueError) as error:
            raise Lost(str(error) or type(error).__name__) from error

    async def beat(self) -> None:
        """Sends a BEAT every BEAT_S until cancelled."""
        while True:
            self.send(MessageKind.BEAT)
            await asyncio.sleep(BEAT_S)


async def greet(link: Link, key: bytes) -> None:
    """Opens a connection on the node's side: knock, TLS, proof of the key.

    The knock is a nonce and its digest with the key. It spares the supervisor TLS handshakes with strangers, but proves
    nothing, since it can be replayed.

    Args:
        link: a connection without TLS, which starts here.
        key: the run's key.

    Raises:
        ProtocolError: the other side does not hold the key, or the connection is intercepted.
        Lost, OSError: the other side disconnected.
    """
    mine = make_nonce()
    link.writer.write(mine + digest(key, b"knock", mine))
    theirs = await _read(link)
    if theirs == NOBODY:
        raise ProtocolError(NO_KEY)
    await link.writer.start_tls(calling_context())
    certificate = link.writer.get_extra_info("ssl_object").getpeercert(True)
    await _prove(link, derive(key, True, mine, theirs, certificate))


async def admit(link: Link, key: bytes, context: ssl.SSLContext, certificate: bytes) -> None:
    """Opens a connection on the supervisor's side; see ``greet``. Raises ProtocolError, Lost, OSError.

    ``certificate`` is the one in ``context``, in DER.
    """
    theirs, knock = await _read(link), await _read(link)
    try:
        require_equal(knock, digest(key, b"knock", theirs))
    except ProtocolError:
        link.writer.write(NOBODY)
        raise
    mine = make_nonce()
    link.writer.write(mine)
    await link.writer.start_tls(context)
    await _prove(link, derive(key, False, mine, theirs, certificate))


async def _prove(link: Link, keys: Keys) -> None:
    link.writer.write(keys.proof)
    require_equal(await _read(link), keys.expected)


async def _read(link: Link) -> bytes:
    try:
        return await link.reader.readexactly(NONCE_BYTES)
    except (OSError, EOFError) as error:
        raise Lost("it disconnected before it authenticated") from error


def listening_context(folder: Path) -> tuple[ssl.SSLContext, bytes]:
    """Makes a TLS context for the supervisor with a new certificate; returns it with the certificate in DER.

    Args:
        folder: folder for a temporary file with the private key; must be private to this user.

    Raises:
        UserError: the package ``cryptography`` is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError as error:
        raise UserError("launch.engine: runners needs cryptography", 'pip install "hpctrain[runners]"') from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hpctrain")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    serial = x509.random_serial_number()
    built = x509.CertificateBuilder(name, name, key.public_key(), serial, now - day, now + 400 * day)
    made = built.sign(key, SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = folder / "certificate"
    path.touch(0o600)
    path.write_bytes(private + made.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(path)
    path.unlink()
    return context, made.public_bytes(Encoding.DER)


def calling_context() -> ssl.SSLContext:
    """Makes a TLS context for a node. It accepts any certificate, since ``greet`` authenticates the supervisor."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context

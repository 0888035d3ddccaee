"""Copies of a node's shards on the next node, sent by background threads so that training does not wait.

Each rank sends its shards over one connection to a rank of the next node; the last node sends to the first. Both sides
prove that they hold the run's token, see ``system.channel``; the data are not encrypted.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format.durable_files import created, write_at
from hpctrain.checkpoint.snapshots import SHARD, SnapshotStore
from hpctrain.comm.world import World
from hpctrain.run.folder import PARTIAL
from hpctrain.system.address import interfaces, listen, meeting_address, routed_address
from hpctrain.system.channel import (
    GREETING_S,
    LARGEST_MESSAGE,
    LENGTH,
    NONCE_BYTES,
    PROOF_BYTES,
    derive,
    make_nonce,
    require_equal,
)

THREAD = "snapshot-copies"
SILENCE_S = 600.0
"""Timeout for the other side during a transfer; long, because it may be suspended or its disk slow."""
PIECE_BYTES = 1 << 20
MOST_INCOMING = 256
"""Limit on open incoming connections, including unauthenticated ones."""
WHAT = "open connections for copies of snapshots"


class Replica:
    """A rank's connection to the next node, and the connections on which the previous node sends copies to this one.

    Args:
        store: this node's snapshots.
        listener: socket on which the previous node connects.
        token: the run's secret token.
    """

    def __init__(self, store: SnapshotStore, listener: socket.socket, token: bytes) -> None:
        self.store = store
        self.listener = listener
        self.token = token
        self.next: tuple[str, int] | None = None
        """Address and port of the next node; None if closed."""
        self.stream: socket.socket | None = None
        """None before ``connect``, and after an error in the middle of a shard: the other side waits for the rest."""
        self.incoming: list[socket.socket] = []

    def start(self) -> None:
        """Start to accept connections from the previous node."""
        threading.Thread(target=self._listen, name=THREAD, daemon=True).start()

    def connect(self, address: str, port: int) -> None:
        """Connect to the next node. Raises OSError."""
        self.next = address, port
        stream = socket.create_connection(self.next, GREETING_S)
        try:
            shake_hands(stream, self.token, calls=True)
            stream.settimeout(SILENCE_S)
            if self.next is None:
                raise ConnectionError("closed while it connected")
        except BaseException:
            stream.close()
            raise
        self.stream = stream

    def send(self, path: Path) -> None:
        """Send a shard; returns when the next node has stored it. Raises OSError."""
        if self.stream is None and self.next is not None:
            self.connect(*self.next)
        if self.stream is None:
            raise ConnectionError("no connection to the next node")
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                tell(self.stream, [path.parent.name, path.name, size])
                self.stream.sendfile(file)
            problem = hear(self.stream)
        except (OSError, ValueError):
            self.stream.close()
            self.stream = None
            raise
        if problem:
            raise OSError(f"the copy on the next node: {problem}")

    def close(self) -> None:
        """Close the connections, which ends the threads."""
        self.next = None
        for stream in (self.listener, self.stream, *list(self.incoming)):
            if stream:
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
                stream.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # ends when the listener is closed
            while True:
                stream, _ = self.listener.accept()
                if len(self.incoming) == MOST_INCOMING:
                    stream.close()
                    continue
                self.incoming.append(stream)
                threading.Thread(target=self._keep, args=(stream,), name=THREAD, daemon=True).start()

    def _keep(self, stream: socket.socket) -> None:
        """Receive and write shards from a rank of the previous node until the connection ends."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.incoming.remove, stream)
            stack.enter_context(stream)
            stack.enter_context(contextlib.suppress(OSError, ValueError))
            stream.settimeout(GREETING_S)
            shake_hands(stream, self.token, calls=False)
            stream.settimeout(None)  # the first snapshot may be hours away
            while True:
                folder, file, size = hear(stream)
                stream.settimeout(SILENCE_S)
                tell(stream, self._write(stream, str(folder), str(file), int(size)))
                stream.settimeout(None)  # the next snapshot may be hours away

    def _write(self, stream: socket.socket, folder: str, file: str, size: int) -> str | None:
        """Receive and write a shard; returns why it could not be stored, or None. Raises OSError if disconnected."""
        problem = None
        buffer = memoryview(bytearray(PIECE_BYTES))
        done = 0
        with contextlib.ExitStack() as files:
            try:
                if not (folder.startswith(PARTIAL) and folder == os.path.basename(folder) and SHARD.fullmatch(file)):
                    raise OSError(f"{folder}/{file} is not a shard")
                self.store.prepare_folder(partial := self.store.path / folder)
                descriptor = files.enter_context(created(partial / file, self.store.file_mode))
            except OSError as error:
                problem = str(error)
            while done < size:
                if not (count := stream.recv_into(buffer[: size - done])):
                    raise ConnectionError("the other side has ended")
                try:
                    if problem is None:
                        write_at(descriptor, buffer[:count], done)
                except OSError as error:
                    problem = str(error)
                done += count
            try:
                if problem is None:
                    os.fdatasync(descriptor)
            except OSError as error:
                problem = str(error)
        return problem


def shake_hands(stream: socket.socket, token: bytes, calls: bool) -> None:
    """Prove to each other that both sides hold the token. Raises OSError if the other side does not."""
    own = make_nonce()
    stream.sendall(own)
    keys = derive(token, calls, own, receive(stream, NONCE_BYTES))
    stream.sendall(keys.proof)
    require_equal(receive(stream, PROOF_BYTES), keys.expected)


def tell(stream: socket.socket, value: Any) -> None:
    """Send a small JSON value. Raises OSError."""
    data = json.dumps(value).encode()
    stream.sendall(LENGTH.pack(len(data)) + data)


def hear(stream: socket.socket) -> Any:
    """Receive a small JSON value. Raises OSError, ValueError."""
    (size,) = LENGTH.unpack(receive(stream, LENGTH.size))
    if size > LARGEST_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(receive(stream, size))


def receive(stream: socket.socket, size: int) -> bytes:
    """Receive ``size`` bytes. Raises OSError if the connection ends first."""
    data = b""
    while len(data) < size:
        if not (part := stream.recv(size - len(data))):
            raise ConnectionError("the other side has ended")
        data += part
    return data


def open_replica(store: SnapshotStore, world: World) -> tuple[Replica | None, str | None]:
    """Connect each rank to the next node; returns (replica, None), or (None, reason) on all ranks. Collective."""
    if world.nodes == 1:
        return None, "the ranks are on one node"
    token = world.everyone.broadcast(secrets.token_hex(32), WHAT)
    own = interfaces()
    everywhere = world.everyone.allgather([world.node, [one.address for one in own]], WHAT)
    others = [addresses for node, addresses in everywhere if node != world.node]
    replica, problem, port = None, None, 0
    address = meeting_address(own, others) or routed_address(others)
    try:
        if address is None:
            raise OSError(f"{world.host} has no network in common with the other nodes")
        replica = Replica(store, listen(address), bytes.fromhex(token))
        port = replica.listener.getsockname()[1]
        replica.start()
    except OSError as error:
        problem = str(error)
    places = world.everyone.allgather([world.node, address, port], WHAT)
    next_node = [place for node, *place in places if node == (world.node + 1) % world.nodes]
    try:
        if replica and all(place[2] for place in places):
            replica.connect(*next_node[world.local_rank % len(next_node)])
    except OSError as error:
        problem = f"{world.host} cannot connect to {next_node[0][0]}: {error}"
    problems = [each for each in world.everyone.allgather(problem, WHAT) if each]
    if problems and replica:
        replica.close()
    return (None, problems[0]) if problems else (replica, None)

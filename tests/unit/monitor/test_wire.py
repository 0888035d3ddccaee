"""Agents talk to agents of their own run only, and to slow ones without limit neither in memory nor in time."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.monitor.node.node import window_message, window_of
from hpctrain.monitor.window import CAUSES, Window
from hpctrain.monitor.wire import FRAME, QUEUED_FRAMES, Connection, Message, ProtocolError

TOKEN = b"t" * 32


@pytest.fixture
def streams() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for stream in pair:
        stream.close()


def exchange(first: Connection, second: Connection, rounds: int = 6) -> tuple[list[Message], list[Message]]:
    at_first: list[Message] = []
    at_second: list[Message] = []
    for _ in range(rounds):
        first.flush() if not first.closed else None
        at_second += second.receive() if not second.closed else []
        second.flush() if not second.closed else None
        at_first += first.receive() if not first.closed else []
    return at_first, at_second


def test_messages_pass_between_holders_of_the_token(streams: tuple[socket.socket, socket.socket]) -> None:
    first, second = Connection(streams[0], TOKEN, calls=True), Connection(streams[1], TOKEN)
    window = Window(
        3, np.array([4, 5]), *(np.random.rand(2, n).astype("f4") for n in (8, 8, 8, len(CAUSES), len(CAUSES)))
    )
    first.send(window_message(window))
    second.send(Message("dump", {"ranks": [1]}))
    at_first, at_second = exchange(first, second)
    assert [message.kind for message in at_first] == ["dump"]
    arrived = window_of(at_second[0])
    assert arrived.index == 3
    np.testing.assert_array_equal(arrived.ranks, window.ranks)
    np.testing.assert_array_equal(arrived.busy, window.busy)
    np.testing.assert_array_equal(arrived.mean, window.mean)


def test_nothing_is_taken_from_or_sent_to_a_stranger(streams: tuple[socket.socket, socket.socket]) -> None:
    ours, stranger = Connection(streams[0], TOKEN), Connection(streams[1], b"x" * 32)
    ours.send(Message("secret"))
    stranger.send(Message("kill"))
    stranger.trusted = True
    at_ours, at_stranger = exchange(ours, stranger)
    assert at_ours == []
    assert "secret" not in [message.kind for message in at_stranger]
    assert ours.closed


def test_what_we_prove_ourselves_proves_nothing_about_the_peer(streams: tuple[socket.socket, socket.socket]) -> None:
    ours, peer = Connection(streams[0], TOKEN), streams[1]
    for _ in ("hello", "proof"):
        ours.flush()
        peer.sendall(peer.recv(4096))
        ours.receive()
    assert ours.closed and not ours.trusted


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 8,
        b"\0\0\0\2\0\0\0\0{}",
        b"\xff" * 100,
        FRAME.pack(4000, 0) + b"[" * 4000,
        Message("proof", {"proof": "é"}).encode(),
        Message("hello", {"nonce": "\ud800"}).encode() + Message("window").encode(),
    ],
)
def test_junk_closes_the_connection(streams: tuple[socket.socket, socket.socket], junk: bytes) -> None:
    ours = Connection(streams[0], TOKEN)
    streams[1].sendall(junk)
    assert ours.receive() == []
    assert ours.closed


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_no_bytes_break_the_decoder(header: bytes, payload: bytes) -> None:
    try:
        Message.decode(header, payload)
    except ProtocolError:
        pass


def test_a_peer_that_does_not_read_costs_messages_not_memory(streams: tuple[socket.socket, socket.socket]) -> None:
    ours = Connection(streams[0], TOKEN)
    ours.trusted = True
    array = np.zeros((1000, 100), dtype="f4")
    for _ in range(3 * QUEUED_FRAMES):
        ours.send(Message("window", {}, {"busy": array}))
        ours.flush()
    assert len(ours.queue) <= QUEUED_FRAMES
    assert ours.dropped > 0


def test_a_closed_peer_is_seen(streams: tuple[socket.socket, socket.socket]) -> None:
    ours = Connection(streams[0], TOKEN)
    streams[1].close()
    ours.receive()
    assert ours.closed

"""Agents talk to agents of their own run only, and to slow ones without limit neither in memory nor in time."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.monitor.connection import HELLO_BYTES, MAGIC, QUEUED_MESSAGES, Connection, new_hello
from hpctrain.monitor.framing import Message
from hpctrain.monitor.node.node import window_message, window_of
from hpctrain.monitor.window import CAUSES, Window
from hpctrain.system.channel import LARGEST_FRAME, PROOF_BYTES, Opener, ProtocolError, Sealer

TOKEN = b"t" * 32
KEY = b"k" * 32


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
        for own, other, inbox in ((first, second, at_second), (second, first, at_first)):
            own.flush()
            if not other.ended:
                inbox += other.receive()
    return at_first, at_second


def test_messages_pass_between_holders_of_the_token(streams):
    first, second = Connection.over(streams[0], TOKEN, calls=True), Connection.over(streams[1], TOKEN)
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


def test_nothing_is_taken_from_or_sent_to_a_stranger(streams):
    ours, stranger = Connection.over(streams[0], TOKEN), streams[1]
    ours.send(Message("secret"))
    ours.flush()
    stranger.sendall(new_hello() + secrets.token_bytes(PROOF_BYTES) + Sealer(KEY).seal(Message("kill").encode()))
    received: list[Message] = []
    while not ours.ended:
        received += ours.receive()
        ours.flush()
    heard = stranger.recv(1 << 16)
    assert received == [] and not ours.trusted
    assert len(heard) == HELLO_BYTES + PROOF_BYTES and b"secret" not in heard


def test_what_we_prove_ourselves_proves_nothing_about_the_peer(streams):
    ours, peer = Connection.over(streams[0], TOKEN), streams[1]
    while not ours.ended:
        ours.flush()
        peer.sendall(peer.recv(4096))
        ours.receive()
    assert not ours.trusted


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n" + b"\r\n" * 40, b"\0" * HELLO_BYTES, b"\xff" * 100])
def test_junk_ends_the_connection(streams, junk):
    ours = Connection.over(streams[0], TOKEN)
    streams[1].sendall(junk)
    assert ours.receive() == []
    assert ours.ended


def test_a_stranger_may_send_as_much_as_it_likes(streams):
    ours, stranger = Connection.over(streams[0], TOKEN), streams[1]
    stranger.setblocking(False)
    flood, sent = MAGIC + b"x" * 2**20, 0
    while not ours.ended:
        try:
            sent += stranger.send(flood)
        except BlockingIOError:
            pass
        ours.receive()
        assert len(ours.greeting) <= HELLO_BYTES + PROOF_BYTES and ours.opener is None


def relayed(streams: tuple[socket.socket, socket.socket]) -> tuple[socket.socket, Connection, Connection]:
    """Two agents that trust each other through a relay; the relay's socket towards the second one."""
    ours, relay = Connection.over(streams[0], TOKEN, calls=True), streams[1]
    near, far = socket.socketpair()
    theirs = Connection.over(far, TOKEN)
    for _ in range(4):
        ours.flush()
        theirs.flush()
        for source, target in ((relay, near), (near, relay)):
            source.setblocking(False)
            try:
                target.sendall(source.recv(4096))
            except BlockingIOError:
                pass
        ours.receive()
        theirs.receive()
    assert ours.trusted and theirs.trusted
    return near, ours, theirs


@pytest.mark.parametrize("trick", ["inject", "repeat", "alter", "leave out", "send back"])
def test_a_relay_can_add_nothing(streams, trick):
    near, ours, theirs = relayed(streams)
    frames = []
    for kind in ("beat", "kill"):
        ours.send(Message(kind))
        ours.flush()
        frames.append(streams[1].recv(4096))
    theirs.send(Message("look"))
    theirs.flush()
    back = near.recv(4096)
    sent = {
        "inject": Message("kill").encode(),
        "repeat": frames[0] + frames[0],
        "alter": frames[0][:-20] + b"!" + frames[0][-19:],
        "leave out": frames[1],
        "send back": back,
    }[trick]
    near.sendall(sent.ljust(100, b"\0"))
    received = [message.kind for _ in range(3) if not theirs.ended for message in theirs.receive()]
    assert theirs.ended and "kill" not in received and "look" not in received
    near.close()
    theirs.close()


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 50))
def test_frames_come_out_as_they_went_in_however_they_are_cut(contents, size):
    sealer, opener = Sealer(KEY), Opener(KEY)
    stream = b"".join(map(sealer.seal, contents))
    opened = [content for at in range(0, len(stream), size) for content in opener.open(stream[at : at + size])]
    assert opened == contents


@given(st.data())
def test_no_altered_byte_passes(data):
    sealer, opener = Sealer(KEY), Opener(KEY)
    stream = bytearray(sealer.seal(b"first") + sealer.seal(b"second"))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        opener.open(bytes(stream))


def test_a_length_is_checked_before_anything_of_the_frame_is_kept():
    with pytest.raises(ProtocolError):
        Opener(KEY).open(b"\xff\xff\xff\xff" + b"\0" * 16)
    sealer = Sealer(KEY)
    with pytest.raises(ProtocolError, match="large"):
        Opener(KEY).open(sealer.seal(b"x" * (LARGEST_FRAME + 1))[:40])


@given(st.binary(max_size=400))
def test_no_bytes_break_the_decoder(content):
    try:
        Message.decode(content)
    except ProtocolError:
        pass


def test_a_peer_that_does_not_read_costs_messages_not_memory(streams):
    ours = Connection.over(streams[0], TOKEN, calls=True)
    theirs = Connection.over(streams[1], TOKEN)
    exchange(ours, theirs)
    array = np.zeros((1000, 100), dtype="f4")
    for _ in range(3 * QUEUED_MESSAGES):
        ours.send(Message("window", {}, {"busy": array}))
        ours.flush()
    assert len(ours.queue) <= QUEUED_MESSAGES
    assert ours.dropped > 0


@pytest.mark.parametrize(("number", "cut"), [(errno.ETIMEDOUT, True), (errno.EHOSTUNREACH, True), (errno.EPIPE, False)])
def test_a_host_that_does_not_answer_is_told_from_a_process_that_ended(streams, number, cut):
    class Dead:
        setblocking = setsockopt = fileno = lambda *_: None

        def recv(self, _):
            raise OSError(number, "said by the kernel")

        send = recv

    for act in (Connection.receive, Connection.flush):
        connection = Connection.over(Dead(), TOKEN)  # type: ignore[arg-type]
        act(connection)
        assert connection.ended and connection.unreachable is cut


def test_a_closed_peer_is_seen(streams):
    ours = Connection.over(streams[0], TOKEN)
    streams[1].close()
    ours.receive()
    assert ours.ended

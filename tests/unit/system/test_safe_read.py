"""Reading what others left: plain files of bounded size, at once."""

import os
import socket
import tracemalloc

import pytest

from hpctrain.system import safe_read

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device", "link to a pipe"])
def test_what_is_not_a_plain_file_is_named_at_once(tmp_path, kind):
    path, server = tmp_path / "file", socket.socket(socket.AF_UNIX)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        server.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    with server, pytest.raises(OSError) as caught:
        safe_read.read(path)
    said = {"socket": "No such device"}.get(kind, f"a {kind.rpartition(' ')[2]}, not a plain file")
    assert said in str(caught.value.strerror)


def test_a_link_to_a_plain_file_is_followed(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert safe_read.read(tmp_path / "link") == b"content"
    assert safe_read.head(tmp_path / "link", 4) == b"cont"
    with pytest.raises(safe_read.TooLarge, match="more than 6 bytes"):
        safe_read.read(tmp_path / "link", 6)


def test_a_large_file_is_refused_without_being_read(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(safe_read.TooLarge):
        safe_read.read(tmp_path / "file", 1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b"", b"{", b"\xff"])
def test_json_that_is_none_is_a_value_error(text):
    with pytest.raises(ValueError):
        safe_read.parse_json(text)


def test_json_of_too_many_values_is_not_parsed():
    text = b"[" + b"[]," * safe_read.MOST_VALUES + b"[]]"
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than"):
        safe_read.parse_json(text)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert len(safe_read.parse_json(b'["' + b"x" * (safe_read.MOST_VALUES + 1) + b'"]')[0]) > safe_read.MOST_VALUES


def test_lines_that_are_too_long_cost_only_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_read, "LINE_BYTES", 10)
    (tmp_path / "file").write_bytes(b"one\n" + b"x" * 25 + b"\nnine char\ntwo\n" + b"y" * 10 + b"\nthree")
    assert list(safe_read.lines(tmp_path / "file")) == [b"one\n", b"nine char\n", b"two\n", b"three"]


def test_of_endless_files_the_beginning_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_read, "MOST_LINES_BYTES", 8)
    (tmp_path / "file").write_bytes(b"one\ntwo\nthree\n")
    assert list(safe_read.lines(tmp_path / "file")) == [b"one\n", b"two\n"]

"""Following files: every byte is read once, and nothing that happens to a file ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import UserError
from hpctrain.run.tail import JsonFile, Tail


def bytes_read_by_this_process() -> int:
    """As the kernel counts them."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_each_byte_is_read_once(tmp_path):
    path = tmp_path / "events.jsonl"
    tail, portion = Tail(path), b'{"a": 1}\n' * 1000 + b'{"torn'
    got, before = b"", bytes_read_by_this_process()
    own = bytes_read_by_this_process() - before
    for _ in range(20):
        with open(path, "ab") as file:
            file.write(portion)
        for _ in range(5):
            got += tail.lines()
    read = bytes_read_by_this_process() - before - 2 * own
    assert abs(read - 20 * len(portion)) < 200
    assert got == (portion * 20).removesuffix(b'{"torn')
    assert tail.offset == 20 * len(portion) and not tail.is_behind


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 9))
def test_lines_are_whole_however_they_are_written_and_read(parts, portion):
    path = Path(f"/dev/shm/hpctrain-test-tail-{os.getpid()}")
    path.write_bytes(b"")
    try:
        tail, got = Tail(path), []
        for part in parts:
            with open(path, "ab") as file:
                file.write(part)
            while lines := tail.lines(portion):
                got.append(lines)
        content = b"".join(parts)
        assert b"".join(got) == content[: content.rfind(b"\n") + 1]
        assert all(lines.endswith(b"\n") for lines in got)
    finally:
        path.unlink()


def test_a_file_that_vanishes_and_another_one_in_its_place(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.lines() == b""
    path.write_bytes(b"one\ntw")
    assert tail.lines() == b"one\n"
    path.rename(tmp_path / "kept")
    assert tail.lines() == b"" and not tail.is_behind
    path.write_bytes(b"new and longer\n")
    assert (tail.lines(), tail.restarts) == (b"new and longer\n", 1)
    path.write_bytes(b"cut\n")
    assert (tail.lines(), tail.restarts) == (b"cut\n", 2)


def test_json_that_is_torn_or_gone_leaves_what_was_known(tmp_path):
    path = tmp_path / "live.json"
    file = JsonFile(path)
    assert (file.read(), file.changed) == (None, None)
    path.write_text('{"step": 1}')
    assert file.read() == {"step": 1}
    path.write_text('{"step": 2, "ran')
    assert file.read() == {"step": 1}
    path.write_text("[1, 2]")
    assert file.read() == {"step": 1}
    assert file.changed == pytest.approx(path.stat().st_mtime)
    path.unlink()
    assert (file.read(), file.changed) == ({"step": 1}, None)
    path.write_text('{"step": 3}')
    assert file.read() == {"step": 3}


def test_what_may_not_be_read_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hpctrain.run.tail.os.open", refuse)  # root may read anything
    with pytest.raises(UserError, match="may not be read: Permission denied"):
        Tail(tmp_path / "events.jsonl").lines()


def test_a_file_that_cannot_be_read_leaves_nothing_to_catch_up_with(tmp_path):
    (tmp_path / "events.jsonl").mkdir()  # has a size, but reading it is an error, as with EIO
    (tmp_path / "events.jsonl" / "entry").touch()
    tail = Tail(tmp_path / "events.jsonl")
    assert (tail.lines(), tail.is_behind) == (b"", False)


def test_content_that_could_not_be_read_is_tried_again(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text('{"a": 1}')
    file = JsonFile(path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError("stale file handle")))
        assert file.read() is None
    assert file.read() == {"a": 1}


def test_no_look_leaves_a_file_open(tmp_path):
    """A live view looks every second for weeks."""
    path, missing = tmp_path / "run.json", tmp_path / "none"
    path.write_bytes(b'{"a": 1}\n')
    looks = [each for one in (path, missing) for each in (Tail(one).lines, JsonFile(one).read)]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for look in looks:
            look()
    assert len(os.listdir("/proc/self/fd")) == before

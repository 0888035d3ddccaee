"""Files that are written at the pace of their disk."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from hpctrain.checkpoint.format import paced_write
from hpctrain.checkpoint.format.paced_write import Dropped, write_paced
from tests.support.mpi import PATIENCE_S

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, MIB, 5 * MIB + 3, 40 * MIB + 1])
def test_all_bytes_are_written_and_every_block_is_visited_once(tmp_path, size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    visited: list[tuple[int, int]] = []
    write_paced(tmp_path / "file", data, lambda *block: visited.append(block))
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    begins = range(0, size, paced_write.BLOCK_BYTES)
    assert sorted(visited) == [(begin, min(size, begin + MIB)) for begin in begins]


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_paced(tmp_path / "file", np.zeros(10, np.uint8))
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """A disk that makes nothing durable before the event is set."""
    free, sync = Event(), os.fdatasync

    def wait(descriptor: int) -> None:
        assert free.wait(PATIENCE_S)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", wait)
    yield free
    free.set()


def test_a_file_is_not_far_ahead_of_what_is_durable_and_can_be_dropped(tmp_path, stalled):
    taken, full, dropped = [], Event(), Event()

    def visit(begin, end):
        taken.append(begin)
        if len(taken) * MIB == paced_write.FIRST_AHEAD_BYTES:
            full.set()

    with ThreadPoolExecutor(1) as thread:
        data = np.zeros(4 * paced_write.FIRST_AHEAD_BYTES, np.uint8)
        writing = thread.submit(write_paced, tmp_path / "file", data, visit, dropped.is_set)
        assert full.wait(PATIENCE_S)
        dropped.set()
        stalled.set()
        with pytest.raises(Dropped):
            writing.result(PATIENCE_S)
    assert len(taken) * MIB == paced_write.FIRST_AHEAD_BYTES


def test_a_full_disk_is_an_error_and_no_hang(tmp_path):
    """The limit on the size of files gives the same as a disk does that is full in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MIB, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            write_paced(tmp_path / "file", np.zeros(30 * MIB, np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG


def test_a_sync_that_fails_is_an_error_and_no_hang(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_paced(tmp_path / "file", np.zeros(30 * MIB, np.uint8))

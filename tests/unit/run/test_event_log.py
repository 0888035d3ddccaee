"""Events that cannot be written cost no training: they wait, in order, and a loss is told."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from hpctrain.run import event_log
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import OtherEvent, Train, decode
from tests.support.faults import FileServer


class Disk:
    """A place that is full or not."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.server = FileServer(errno.ENOSPC, str(path), "write", times=0).install(monkeypatch)

    def fill(self) -> None:
        self.server.left = math.inf

    def free(self) -> None:
        self.server.left = 0

    def steps(self) -> list[int]:
        return [event.step for event in decode(self.path.read_bytes())]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.delenv("HPCTRAIN_ATTEMPT", raising=False)
    return Disk(tmp_path / "events.jsonl", monkeypatch)


def test_events_wait_for_space_and_come_in_order(disk):
    said: list[str] = []
    writer = EventWriter(disk.path, said.append)
    writer.append(Train(step=1))
    disk.fill()
    writer.append(Train(step=2))
    writer.append(Train(step=3, time=5.0))
    disk.free()
    writer.append(Train(step=4))
    disk.fill()
    writer.append(Train(step=5))
    disk.free()
    writer.close()
    assert disk.steps() == [1, 2, 3, 4, 5]
    assert decode(disk.path.read_bytes())[2].time == 5.0
    (warning,) = said
    assert "events.jsonl cannot be written: No space left on device; training continues" in warning


def test_what_is_lost_at_the_end_is_told_once(disk):
    said: list[str] = []
    writer = EventWriter(disk.path, said.append)
    disk.fill()
    for step in range(3):
        writer.append(Train(step=step))
    writer.close()
    writer.close()
    assert len(said) == 2
    assert said[1].endswith("No space left on device: events of this run that are lost: 3")


def test_memory_is_bounded(disk, monkeypatch):
    monkeypatch.setattr(event_log, "MOST_WAITING", 4)
    said: list[str] = []
    writer = EventWriter(disk.path, said.append)
    disk.fill()
    for step in range(10):
        writer.append(Train(step=step))
    disk.free()
    writer.close()
    assert disk.steps() == [6, 7, 8, 9]
    assert said[1].endswith("events of this run that are lost: 6")


@pytest.mark.parametrize("room", [0, 1, 30, 69, 70, 71, 72, 100, 139, 140, 141, 180])
def test_a_disk_that_fills_within_a_line_repeats_no_event(disk, monkeypatch, room):
    """Nor does it where all of a line but its end was written. A line has 70 bytes."""
    said: list[str] = []
    writer = EventWriter(disk.path, said.append)
    disk.fill()
    writer.append(OtherEvent(called="train", step=1, time=1.0))
    writer.append(OtherEvent(called="train", step=2, time=1.0))
    assert [len(line) for line in writer.waiting] == [70, 70]
    disk.free()
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:room]))
    writer.append(OtherEvent(called="train", step=3, time=1.0))
    monkeypatch.setattr(os, "write", write)
    writer.append(OtherEvent(called="train", step=4, time=1.0))
    writer.close()
    assert disk.steps() == [1, 2, 3, 4]


def test_a_run_folder_that_is_gone_ends_nothing(tmp_path):
    said: list[str] = []
    writer = EventWriter(tmp_path / "gone" / "events.jsonl", said.append)
    writer.append(Train(step=1))
    writer.close()
    assert "No such file or directory" in said[0] and "that are lost: 1" in said[1]

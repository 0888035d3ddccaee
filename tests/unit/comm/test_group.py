"""Collectives of a group, on a communicator of this process only."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm import group
from hpctrain.comm.group import Group
from hpctrain.errors import RunFailed

LARGE_BROADCAST = """
import numpy as np
from mpi4py import MPI
from hpctrain.comm.group import Group

values = np.zeros(2**31 + 8, np.uint8)  # its pages are never touched
Group("alone", MPI.COMM_SELF).broadcast_array(values, "receive the model")
matrix = np.arange(6.0).reshape(2, 3)
Group("alone", MPI.COMM_SELF).broadcast_array(matrix, "receive the model")
alone = Group("alone", MPI.COMM_SELF)
assert alone.broadcast(np.bool_(True)) is True and alone.allgather({"loss": np.float32(0.5)}) == [{"loss": 0.5}]
print(values.size, matrix.sum())
try:
    Group("alone", MPI.COMM_SELF).add(matrix.T)
except AssertionError as error:
    print(error)
"""


def test_arrays_beyond_2_gib_are_broadcast():
    pytest.importorskip("mpi4py")
    run = subprocess.run(
        [sys.executable, "-c", LARGE_BROADCAST], env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    said = f"{2**31 + 8} 15.0\notherwise these are the bytes of a copy\n"
    assert (run.stdout, run.returncode) == (said, 0), run.stderr


class Late:
    """A message that is there after a number of looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def Test(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_waits_for_messages_sleep_once_their_time_awake_is_over(monkeypatch):
    naps: list[float] = []
    clock = itertools.count()
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: next(clock) / 1024, sleep=naps.append))
    messages: Any = [Late(8), Late(24)]
    Group("alone").settle(messages, "send gradients")
    assert naps == []
    messages = [Late(8), Late(24)]
    Group("alone").settle(messages, "send gradients", awake_s=16 / 1024)
    assert naps == sorted(naps)
    assert len(naps) == 8


def test_a_message_that_never_comes_ends_the_wait(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    messages: Any = [Late(10**9)]
    with pytest.raises(RunFailed, match="waited 900 s for the other ranks to send gradients"):
        Group("alone").settle(messages, "send gradients")

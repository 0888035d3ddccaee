"""Collectives of a group, on a communicator of this process only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LARGE_BROADCAST = """
import numpy as np
from mpi4py import MPI
from hpctrain.comm.group import Group

values = np.zeros(2**31 + 8, np.uint8)  # its pages are never touched
Group("alone", MPI.COMM_SELF).broadcast_array(values, "receive the model")
matrix = np.arange(6.0).reshape(2, 3)
Group("alone", MPI.COMM_SELF).broadcast_array(matrix, "receive the model")
print(values.size, matrix.sum())
"""


def test_arrays_beyond_2_gib_are_broadcast() -> None:
    pytest.importorskip("mpi4py")
    run = subprocess.run(
        [sys.executable, "-c", LARGE_BROADCAST], env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    assert (run.stdout, run.returncode) == (f"{2**31 + 8} 15.0\n", 0), run.stderr

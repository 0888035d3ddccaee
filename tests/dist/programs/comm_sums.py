"""Every host sum against the exact computation, and the collectives of World and Group; prints 'right' on each rank."""

from __future__ import annotations

import os

import numpy as np

from hpctrain.reduce import shm_allreduce
from hpctrain.reduce.compression import CODECS
from hpctrain.comm.group import Group
from hpctrain.reduce.mpi_allreduce import CompressedSum, FlatSum, HostSum, OverlappedSum
from hpctrain.reduce.shm_allreduce import open_node_sum
from hpctrain.reduce.ring_allreduce import RingSum
from hpctrain.comm.world import World, connect
from hpctrain.errors import RunFailed

EXTRA = 16


def terms(size: int, length: int, seed: int) -> list[np.ndarray]:
    """Each rank's values."""
    return [np.random.default_rng([seed, rank]).standard_normal(length).astype(np.float32) for rank in range(size)]


def check(world: World, reducer: HostSum, length: int, exact: bool = True) -> None:
    """Many sums in a row, so that a race between them would show."""
    for seed in range(40):
        mine = terms(world.size, length, seed)
        reducer.buffer[:] = mine[world.rank]
        reducer.start(0, length // 2)
        reducer.start(length // 2, length)
        reducer.finish()
        total = np.sum(mine, axis=0, dtype=np.float64)
        if exact:
            np.testing.assert_allclose(reducer.buffer, total, rtol=0, atol=1e-5)
        else:
            expected = wire(mine)
            np.testing.assert_array_equal(reducer.buffer[:-EXTRA], expected[:-EXTRA])
            np.testing.assert_allclose(reducer.buffer[-EXTRA:], total[-EXTRA:], rtol=0, atol=1e-6)
        same = world.data.allgather(reducer.buffer.tobytes().hex()[:4096], "compare the bits")
        assert len(set(same)) == 1
    reducer.close()


def wire(mine: list[np.ndarray]) -> np.ndarray:
    """Each term rounded to half precision, added in fp32 in rank order, and the sum rounded again."""
    total = np.zeros_like(mine[0])
    for term in mine:
        total += term.astype(np.float16).astype(np.float32)
    return total.astype(np.float16).astype(np.float32)


def collectives(world: World) -> None:
    """Values through JSON, arrays in place, and a wait that ends."""
    group = world.everyone
    assert group.allgather({"rank": world.rank}, "gather") == [{"rank": rank} for rank in range(world.size)]
    assert group.allgather("", "gather nothing") == [""] * world.size
    last = world.size - 1
    assert group.broadcast(["from", world.rank], "broadcast", root=last) == ["from", last]
    array = np.full(3, world.rank, np.float64)
    group.broadcast_array(array, "broadcast", root=last)
    assert array.tolist() == [last] * 3
    assert group.sum(np.arange(3), "add").tolist() == [0, world.size, 2 * world.size]
    assert (world.local_rank, world.local_size, world.nodes) == (world.rank, world.size, 1)
    if world.rank == 0 and world.size > 1:
        try:
            world.local.barrier("wait for one that comes late", timeout_s=0.2)
            raise AssertionError("nobody was there")
        except RunFailed as error:
            assert "wait for one that comes late" in str(error)
    group.barrier("go on")
    if world.rank > 0:
        world.local.barrier("arrive late")
    group.barrier("end")


def across_nodes(world: World) -> None:
    """Four ranks that take themselves for two nodes of two, and for nodes of three and one."""
    from mpi4py import MPI

    def group_of(first_node: int) -> Group:
        class Nodes(MPI.Intracomm):
            def Split_type(self, *arguments: object, **more: object) -> MPI.Comm:
                return self.Split(color=int(self.Get_rank() >= first_node))

        return Group("data", Nodes(world.data.comm.Dup()))

    for length in (EXTRA, 1000, 100_003):
        for ring in (False, True):
            shared = open_node_sum(group_of(2), length, ring=ring)
            assert shared is not None
            assert shared.peers is not None
            assert len(shared.parts) == 2
            check(world, shared, length)
    assert open_node_sum(group_of(3), 100) is None


def main() -> None:
    """Everything on the ranks that there are."""
    world = connect()
    collectives(world)
    if world.size > 1:
        for length in (EXTRA, 1000, 100_003):
            check(world, FlatSum(world.data, length), length)
            check(world, OverlappedSum(world.data, length), length)
            check(world, RingSum(world.data, length), length)
            check(world, CompressedSum(world.data, length, EXTRA, CODECS["fp16"]), length, exact=False)
            shared = open_node_sum(world.data, length)
            assert shared is not None
            check(world, shared, length)
        if world.size == 4:
            across_nodes(world)
        assert not [name for name in os.listdir(shm_allreduce.FOLDER) if name.startswith("hpctrain-")]
        shm_allreduce.FOLDER = "/nowhere" if world.rank == world.size - 1 else shm_allreduce.FOLDER
        shm_allreduce.FOLDER = "/nowhere" if world.rank == 0 else shm_allreduce.FOLDER
        assert open_node_sum(world.data, 100) is None
    print(f"rank {world.rank} of {world.size}: right")


if __name__ == "__main__":
    main()

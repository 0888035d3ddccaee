"""Every host sum against the exact computation, and the collectives of World and Group; prints 'right' on each rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np

from hpctrain.comm import group as group_module
from hpctrain.comm.group import Arrays, Group
from hpctrain.comm.world import World, connect
from hpctrain.errors import RunFailed
from hpctrain.reduce import shm_allreduce, streamed_allreduce
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import SQUARE, Layout, plan
from hpctrain.reduce.host_allreduce import PieceAllreduce, open_piece_allreduce, open_streamed_allreduce
from hpctrain.reduce.mpi_allreduce import LARGEST_MESSAGE, FlatAllreduce, HostAllreduce
from hpctrain.reduce.row_exchange import RowExchange, SparseRows
from hpctrain.reduce.shm_allreduce import (
    ShmWindow,
    SmallShmAllreduce,
    open_shm_allreduce,
    open_shm_pieces,
    open_shm_small,
    open_shm_window,
    share_arrays,
)
from hpctrain.reduce.streamed_allreduce import StreamedAllreduce
from hpctrain.system import shared_memory
from tests.support.codecs import CODECS

EXTRA = 16
PIECES: list[list[tuple[int, ...]]] = [[], [(1,)], [(3, 5), (), (70_001,), (16,)], [(40_000, 3), (2, 2)]]
"""Shapes chosen so that the ranks' slices end within pieces, and some slices contain only slots."""


def laid_out(shapes: list[tuple[int, ...]]) -> Layout:
    """Pieces one after the other, then the slots."""
    return plan([math.prod(shape) for shape in shapes], None, EXTRA)


TURNS = 40
"""Sums in a row of each reducer, so that races show."""


@functools.lru_cache(maxsize=TURNS)  # each reducer of a length adds up the same
def terms(size: int, length: int, seed: int) -> list[np.ndarray]:
    """The values of each rank."""
    ranks = [np.random.default_rng([seed, rank]).standard_normal(length).astype(np.float32) for rank in range(size)]
    for values in ranks:
        values.flags.writeable = False
    return ranks


def check(
    world: World,
    reducer: HostAllreduce,
    length: int,
    expected: Callable[[list[np.ndarray]], np.ndarray] | None = None,
) -> None:
    """Compare many sums in a row; with ``expected``, bitwise. Results are overwritten once they arrive, as an optimizer
    may do."""
    for seed in range(TURNS):
        mine = terms(world.size, length, seed)
        reducer.buffer[:] = mine[world.rank]
        reducer.start(0, length // 2)
        reducer.start(length // 2, length)
        first = None
        if isinstance(reducer, StreamedAllreduce):
            reducer.arrive(1)
            first = reducer.buffer[: length // 2].copy()
            reducer.buffer[: length // 2] = math.nan
        reducer.finish()
        if first is not None:
            reducer.buffer[: length // 2] = first
        total = np.sum(mine, axis=0, dtype=np.float64)
        if expected is None:
            np.testing.assert_allclose(reducer.buffer, total, rtol=0, atol=1e-5)
        else:
            np.testing.assert_array_equal(reducer.buffer, expected(mine))
            np.testing.assert_allclose(reducer.buffer[-EXTRA:], total[-EXTRA:], rtol=0, atol=1e-5)
        same = world.data.allgather(crc32(reducer.buffer), "compare the bits")
        assert len(set(same)) == 1
    reducer.close()


def check_pieces(world: World, pieces: PieceAllreduce, shapes: list[tuple[int, ...]]) -> None:
    """The same for sums of pieces, whose inputs must not change."""
    for seed in range(TURNS):
        ranks = [terms(world.size, size, seed) for size in [*map(math.prod, shapes), EXTRA]]
        mine = [each[world.rank].reshape(shape) for each, shape in zip(ranks, [*shapes, (EXTRA,)], strict=True)]
        mine[-1] = mine[-1].copy()
        mine[-1][SQUARE] = 0
        sums = pieces.sum(*mine)
        for total, each, own in zip(sums[:-1], ranks[:-1], mine[:-1], strict=True):
            wanted = np.sum(each, axis=0, dtype=np.float64).reshape(total.shape)
            np.testing.assert_allclose(total, wanted, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(own.reshape(-1), each[world.rank])
        slots = np.sum(ranks[-1], axis=0, dtype=np.float64)
        slots[SQUARE] = sum(float(np.sum(np.square(total, dtype=np.float64))) for total in sums[:-1])
        np.testing.assert_allclose(sums[-1], slots, rtol=1e-5, atol=1e-5)
        same = world.data.allgather([crc32(total.tobytes()) for total in sums], "compare the bits")
        assert all(each == same[0] for each in same)
    pieces.close()


def check_rows(world: World, dtype: type[np.floating], largest: int) -> None:
    """Sums of rows of tables of several widths: some rows; sometimes none on rank 0; and all but one row of a table,
    which is then summed densely."""
    tables = [(50, 3), (70_000, 5), (7, 1), (20, 4)]
    exchange = RowExchange(world.data, tables, dtype, largest)
    random = np.random.default_rng([3, world.rank])
    for turn in range(20):
        given = []
        for rows, columns in tables:
            most = 0 if world.rank == 0 and turn % 3 == 0 else int(random.integers(0, min(rows, 9)))
            all_but_one = np.delete(np.arange(rows), world.rank)
            indices = all_but_one if columns == 4 else random.permutation(rows)[:most]
            given.append(SparseRows(indices, random.normal(size=(len(indices), columns)).astype(dtype)))
        for table, mine, total in zip(tables, given, exchange.sum(given), strict=True):
            whole, found = np.zeros(table), np.zeros(table)
            assert table[1] != 4 or len(total.indices) == table[0], "each row is one of some rank"
            whole[mine.indices], found[total.indices] = mine.values, total.values
            np.testing.assert_allclose(found, world.data.sum(whole, "add up tables"), rtol=0, atol=1e-5)
            assert len(np.unique(total.indices)) == len(total.indices) and total.values.dtype == dtype
            assert total.indices.flags.aligned, "as frameworks want it that share the memory"
    exchange.close()


def streamed(fp16: bool, ranks_per_node: int = 1) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Pairwise sums within each node, rounded for the wire, summed pairwise in fp32, rounded again if sent again."""

    def rounded(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:-EXTRA].astype(np.float16).astype(np.float32), values[-EXTRA:]])

    def by_twos(terms: list[np.ndarray]) -> np.ndarray:
        half = (1 << (len(terms) - 1).bit_length()) // 2
        return terms[0] if len(terms) == 1 else by_twos(terms[:half]) + by_twos(terms[half:])

    def expected(mine: list[np.ndarray]) -> np.ndarray:
        nodes = [by_twos(mine[at : at + ranks_per_node]) for at in range(0, len(mine), ranks_per_node)]
        if not fp16 or len(nodes) == 1:
            return by_twos(nodes)
        total = by_twos([*map(rounded, nodes)])
        return total if len(nodes) == 2 else rounded(total)

    return expected


def collectives(world: World) -> None:
    """Collectives of Python values and of arrays in place, and a wait that times out."""
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
        try:
            world.local.meet("wait for one that comes late", timeout_s=0.2)
            raise AssertionError("nobody was there")
        except RunFailed as error:
            assert f"rank 0 of {world.size} waited 0 s for the other ranks to wait for one" in str(error)
    group.barrier("go on")
    if world.rank > 0:
        world.local.barrier("arrive late")
        world.local.meet("arrive late")
    group.barrier("end")


def merged_in_order(world: World) -> None:
    """Arrays of a different length on each rank, one of them empty, and scalars; also in more than one message."""

    def add(first: Arrays, second: Arrays) -> Arrays:
        return {"rows": np.concatenate([first["rows"], second["rows"]]), "sum": np.add(first["sum"], second["sum"])}

    most, group_module.LARGEST_BYTES = group_module.LARGEST_BYTES, 24
    mine = np.full((5 * world.rank, 2), world.rank, np.int16)
    found = world.data.merge({"rows": mine, "sum": np.array(world.rank + 0.5)}, add, "merge their arrays")
    group_module.LARGEST_BYTES = most
    assert (found is None) == (world.rank > 0)
    if found is not None:
        assert found["rows"][:, 1].tolist() == [rank for rank in range(world.size) for _ in range(5 * rank)]
        assert (found["sum"].shape, found["sum"]) == ((), sum(range(world.size)) + 0.5 * world.size)


def suspended(world: World) -> None:
    """Time in which a rank is stopped, as in a suspended job, does not count as waiting."""
    waiting = world.local.broadcast(os.getpid(), "learn whom to stop")
    if world.rank == 0:
        world.local.meet("end its break", timeout_s=4.0)
        return
    if world.rank == 1:
        time.sleep(0.2)
        os.kill(waiting, signal.SIGSTOP)
        time.sleep(4.5)
        os.kill(waiting, signal.SIGCONT)
        time.sleep(0.2)
    world.local.meet("end the others' break")


class LateReader(Group):
    """Group whose last rank is late to read what the others have published."""

    def meet(self, what: str, timeout_s: float = 60.0) -> None:
        super().meet(what, timeout_s)
        time.sleep(0.002 * (self.rank == self.size - 1))


def small_in_a_row(world: World) -> None:
    """A rank that is ahead does not overwrite what another rank is still reading."""
    shared = share_arrays(world.data, 2 * 1000, np.float32)
    assert shared is not None
    late = dataclasses.replace(shared, node=LateReader("node", shared.node.comm))
    reducer = SmallShmAllreduce(late)
    for turn in range(20):
        reducer.buffer[:] = world.rank + turn
        reducer.finish()
        np.testing.assert_array_equal(reducer.buffer, sum(rank + turn for rank in range(world.size)))
    reducer.close()


def check_window(world: World) -> None:
    """Arrays of no, one and several pieces and of several types, also with a rank that reads late."""
    shared = share_arrays(world.data, 2 * 2**20, np.uint8)
    assert shared is not None
    late = ShmWindow(dataclasses.replace(shared, node=LateReader("node", shared.node.comm)))
    window = open_shm_window(world.data)
    assert window is not None and window.piece == shm_allreduce.PIECE
    for turn, (length, dtype) in enumerate(
        itertools.product((0, 1, 1000, 70_001, 300_000), (np.float32, np.float64, np.complex64, np.int64))
    ):
        ranks = [np.random.default_rng([turn, rank]).normal(size=length) * 100 for rank in range(world.size)]
        mine = [values.astype(dtype) for values in ranks]
        total = np.empty(length, dtype)
        for shown in (window, late):
            shown.sum(mine[world.rank], total, "add up")
            np.testing.assert_allclose(total, np.sum(mine, axis=0), rtol=0, atol=1e-3)  # a few float32 roundings of 100
            assert len(set(world.data.allgather(total.tobytes().hex()[-4096:], "compare the bits"))) == 1
        own = mine[world.rank].copy()
        window.sum(own, own, "add up in place")
        np.testing.assert_array_equal(own, total)
    late.close()
    window.close()


def on_nodes(world: World, ranks_per_node: int) -> Group:
    """Group of ranks that take themselves to be on several nodes."""
    from mpi4py import MPI

    class Nodes(MPI.Intracomm):
        def Split_type(self, *arguments: object, **more: object) -> MPI.Comm:
            return self.Split(color=self.Get_rank() // ranks_per_node)

    assert world.data.comm is not None
    return Group("data", Nodes(world.data.comm.Dup()))


def spread(world: World) -> None:
    """Sums are bitwise those of all ranks pairwise, on nodes of 1, 2, 4 or all ranks; not on nodes of 3."""
    length = 50_003
    for ranks in {1, 2, 4, world.size}:
        if world.size % ranks == 0:
            reducer = open_streamed_allreduce(on_nodes(world, ranks), length, np.float32)
            assert reducer.node.size == ranks
            check(world, reducer, length, streamed(fp16=False))
    if world.size == 6:
        reducer = open_streamed_allreduce(on_nodes(world, 3), length, np.float32)
        check(world, reducer, length, streamed(fp16=False, ranks_per_node=3))


def across_nodes(world: World) -> None:
    """Four ranks as if on two nodes of two, or on nodes of three and one."""

    def group_of(ranks_per_node: int) -> Group:
        return on_nodes(world, ranks_per_node)

    for length in (EXTRA, 1000, 100_003):
        shared = open_shm_allreduce(group_of(2), length)
        assert shared is not None
        assert shared.between is not None
        assert len(shared.parts) == 2
        check(world, shared, length)
        for codec in (None, CODECS["fp16"]):
            reducer = open_streamed_allreduce(group_of(2), length, np.float32, codec)
            check(world, reducer, length, streamed(codec is not None, ranks_per_node=2))
    for shapes in PIECES:
        pieces = open_shm_pieces(group_of(2), laid_out(shapes), shapes, np.float32)
        assert pieces is not None and pieces.between is not None
        check_pieces(world, pieces, shapes)
    assert open_shm_allreduce(group_of(3), 100) is None
    assert open_shm_small(group_of(2), 100, np.float32) is None, "the nodes share no memory"
    assert open_shm_window(group_of(2)) is None


def main() -> None:
    """Run everything on at most four ranks."""
    world = connect()
    own = world.data.broadcast(tempfile.mkdtemp(dir=shared_memory.FOLDER) if world.rank == 0 else "", "share memory")
    shared_memory.FOLDER = own
    if world.size > 4:
        spread(world)
    else:
        everything(world)
    world.data.barrier("are done with their memory")
    if world.rank == 0:
        os.rmdir(own)
    print(f"rank {world.rank} of {world.size}: right")


def everything(world: World) -> None:
    """Check each kind of sum, and the collectives."""
    collectives(world)
    merged_in_order(world)
    if world.size > 1:
        suspended(world)
        small_in_a_row(world)
        check_window(world)
        for length in (EXTRA, 1000, 100_003):
            check(world, FlatAllreduce(world.data, length), length)
            for fp16, node_first in ((False, True), (True, False)):
                codec, together = CODECS["fp16"] if fp16 else None, world.size if node_first else 1
                reducer = open_streamed_allreduce(world.data, length, np.float32, codec, node_first)
                check(world, reducer, length, streamed(fp16, together))
            streamed_allreduce.PIECE_BYTES, before = 2**20, streamed_allreduce.PIECE_BYTES
            reducer = open_streamed_allreduce(world.data, length, np.float32, None, node_first=False)
            check(world, reducer, length, streamed(fp16=False))  # messages that MPI does not copy before it sends them
            streamed_allreduce.PIECE_BYTES = before
            shared = open_shm_allreduce(world.data, length)
            assert shared is not None
            check(world, shared, length)
            small = open_shm_small(world.data, length, np.float32)
            assert (small is None) == (length == 100_003), "whether each rank adds up all of it"
            if small is not None:
                check(world, small, length)
        for shapes in PIECES:
            for way in ("mpi-node", "mpi-pieces", "mpi-flat"):
                candidate, sums = open_piece_allreduce(
                    Candidate.parse(way), world.data, laid_out(shapes), shapes, np.float32, CODECS
                )
                assert candidate.name == way
                check_pieces(world, sums, shapes)
            pieces = open_shm_pieces(world.data, laid_out(shapes), shapes, np.float32)
            assert pieces is not None
            check_pieces(world, pieces, shapes)
        check_rows(world, np.float32, LARGEST_MESSAGE)
        check_rows(world, np.float32, 100)
        check_rows(world, np.float64, LARGEST_MESSAGE)
        if world.size == 4:
            spread(world)
            across_nodes(world)
        world.data.meet("have unlinked what they shared")
        assert world.rank > 0 or not any(Path(shared_memory.FOLDER).iterdir())
        shared_memory.FOLDER = "/nowhere" if world.rank == world.size - 1 else shared_memory.FOLDER
        shared_memory.FOLDER = "/nowhere" if world.rank == 0 else shared_memory.FOLDER
        assert open_shm_allreduce(world.data, 100) is None and open_shm_window(world.data) is None


if __name__ == "__main__":
    main()

"""Checks the values of every Horovod operation that our torch reducers use. Run under mpirun."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from mpi4py import MPI


def contribution(rank: int, dtype: torch.dtype, length: int = 1000) -> torch.Tensor:
    """What a rank contributes: integers, so sums are exact in every dtype, different for every element and rank."""
    return ((torch.arange(length) % 50) + rank).to(dtype)


def check_allreduce(dtype: torch.dtype, **where: hvd.ProcessSet) -> None:
    ranks = where["process_set"].ranks if where else range(hvd.size())
    expected = sum(contribution(rank, torch.float64) for rank in ranks)
    mine = contribution(hvd.rank(), dtype)
    total = hvd.allreduce(mine, op=hvd.Sum, name=f"sum.{dtype}.{bool(where)}", **where)
    assert total.dtype == dtype and torch.equal(total.double(), expected)
    assert torch.equal(mine, contribution(hvd.rank(), dtype)), "the input was changed"
    if dtype.is_floating_point:
        mean = hvd.allreduce(mine, op=hvd.Average, name=f"mean.{dtype}.{bool(where)}", **where)
        torch.testing.assert_close(mean.double(), expected / len(ranks), rtol=2e-3, atol=0)
    assert hvd.allreduce_(mine, op=hvd.Sum, name=f"inplace.{dtype}.{bool(where)}", **where) is mine
    assert torch.equal(mine.double(), expected)


def check_grouped(dtype: torch.dtype) -> None:
    lengths = (1, 7, 100_000)
    mine = [contribution(hvd.rank(), dtype, length) for length in lengths]
    handle = hvd.grouped_allreduce_async(mine, op=hvd.Sum, name=f"group.{dtype}")
    for length, total in zip(lengths, hvd.synchronize(handle), strict=True):
        expected = sum(contribution(rank, torch.float64, length) for rank in range(hvd.size()))
        assert torch.equal(total.double(), expected)


def check_asynchronous() -> None:
    """Operations started in a different order on every rank: Horovod matches them by name."""
    names = [str((index + hvd.rank()) % 8) for index in range(8)]
    handles = {n: hvd.allreduce_async(torch.full((64,), float(n)), op=hvd.Sum, name=f"async.{n}") for n in names}
    for name, handle in handles.items():
        assert torch.equal(hvd.synchronize(handle), torch.full((64,), float(name) * hvd.size()))


def check_broadcast(dtype: torch.dtype) -> None:
    root = hvd.size() - 1
    got = hvd.broadcast(contribution(hvd.rank(), dtype), root_rank=root, name=f"broadcast.{dtype}")
    assert got.dtype == dtype and torch.equal(got, contribution(root, dtype))


def check_allgather(dtype: torch.dtype) -> None:
    """Parts of uneven length, empty on rank 0."""
    gathered = hvd.allgather(torch.full((hvd.rank(), 3), hvd.rank()).to(dtype), name=f"gather.{dtype}")
    expected = torch.cat([torch.full((rank, 3), rank).to(dtype) for rank in range(hvd.size())])
    assert gathered.dtype == dtype and torch.equal(gathered, expected)


def main() -> None:
    hvd.init(process_sets="dynamic")
    assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64):
        check_allreduce(dtype)
        check_grouped(dtype)
        check_broadcast(dtype)
        check_allgather(dtype)
    check_asynchronous()
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    if hvd.rank() % 2 == 0:
        check_allreduce(torch.float32, process_set=even)
    MPI.COMM_WORLD.Barrier()
    print(f"rank {hvd.rank()} of {hvd.size()}: values are right", flush=True)


if __name__ == "__main__":
    main()

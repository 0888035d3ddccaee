"""Checks the values of every Horovod operation that our TensorFlow reducer uses. Run under mpirun."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from mpi4py import MPI


def contribution(rank: int, dtype: tf.DType, length: int = 1000) -> tf.Tensor:
    """What a rank contributes: integers, so sums are exact in every dtype, different for every element and rank."""
    return tf.cast(tf.range(length) % 50 + rank, dtype)


def expected_sum(ranks: range | list[int], length: int = 1000) -> np.ndarray:
    return sum(contribution(rank, tf.float64, length).numpy() for rank in ranks)


def check_allreduce(dtype: tf.DType, **where: hvd.ProcessSet) -> None:
    ranks = where["process_set"].ranks if where else range(hvd.size())
    mine = contribution(hvd.rank(), dtype)
    total = hvd.allreduce(mine, op=hvd.Sum, name=f"sum.{dtype.name}.{bool(where)}", **where)
    assert total.dtype == dtype
    np.testing.assert_array_equal(total.numpy().astype("f8"), expected_sum(ranks))
    if dtype.is_floating:
        mean = hvd.allreduce(mine, op=hvd.Average, name=f"mean.{dtype.name}.{bool(where)}", **where)
        np.testing.assert_allclose(mean.numpy().astype("f8"), expected_sum(ranks) / len(ranks), rtol=2e-3)


def check_grouped_in_a_graph(dtype: tf.DType) -> None:
    lengths = (1, 7, 100_000)

    @tf.function
    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return hvd.grouped_allreduce(tensors, op=hvd.Sum)

    for _ in range(3):  # the second and third time from Horovod's response cache
        totals = reduce([contribution(hvd.rank(), dtype, length) for length in lengths])
        for length, total in zip(lengths, totals, strict=True):
            np.testing.assert_array_equal(total.numpy().astype("f8"), expected_sum(range(hvd.size()), length))


def check_broadcast(dtype: tf.DType) -> None:
    root = hvd.size() - 1
    got = hvd.broadcast(contribution(hvd.rank(), dtype), root_rank=root, name=f"broadcast.{dtype.name}")
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.numpy(), contribution(root, dtype).numpy())


def check_broadcast_of_variables() -> None:
    variables = [tf.Variable(tf.fill([5], float(hvd.rank() + 1))), tf.Variable(hvd.rank() + 7)]
    hvd.broadcast_variables(variables, root_rank=0)
    np.testing.assert_array_equal(variables[0].numpy(), np.ones(5))
    assert variables[1].numpy() == 7


def check_allgather(dtype: tf.DType) -> None:
    """Parts of uneven length, empty on rank 0."""
    gathered = hvd.allgather(tf.cast(tf.fill([hvd.rank(), 3], hvd.rank()), dtype), name=f"gather.{dtype.name}")
    expected = np.concatenate([np.full((rank, 3), rank) for rank in range(hvd.size())])
    np.testing.assert_array_equal(gathered.numpy(), expected)


def main() -> None:
    hvd.init(process_sets="dynamic")
    assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    for dtype in (tf.float32, tf.float64, tf.float16, tf.int32, tf.int64):
        check_allreduce(dtype)
        check_broadcast(dtype)
        check_allgather(dtype)
    for dtype in (tf.float32, tf.float64, tf.float16):
        check_grouped_in_a_graph(dtype)
    check_broadcast_of_variables()
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    if hvd.rank() % 2 == 0:
        check_allreduce(tf.float32, process_set=even)
    MPI.COMM_WORLD.Barrier()
    print(f"rank {hvd.rank()} of {hvd.size()}: values are right", flush=True)


if __name__ == "__main__":
    main()

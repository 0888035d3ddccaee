"""Sums known numbers by every way to exchange TensorFlow gradients; rank 0 prints what differs from the exact sum."""

from __future__ import annotations

import functools
import json
from zlib import crc32

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.backends.tensorflow.keras_reducer import KerasReducerFactory, Pieces
from hpctrain.comm.group import Group
from hpctrain.comm.world import connect
from hpctrain.reduce.candidates import EVERY_CANDIDATE, Candidate
from hpctrain.reduce.flat_layout import LOSS, SQUARE, WEIGHT

SHAPES = [(300, 301), (7,), (33, 3), (), (33, 3), (129, 128), (7,), (5, 2, 3), (33, 3)]
"""Two large shapes, several small equal ones, and single small ones."""
WIRE = {"none": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@functools.cache  # which each candidate asks for
def numbers(rank: int, step: int) -> list[NDArray[np.float32]]:
    """Gradients of very different magnitudes; then two slots with more digits than 16 bits hold."""
    random = np.random.default_rng((rank, step))
    shapes = [*SHAPES, (2,)]
    values = [random.normal(size=shape) * 10.0 ** random.integers(-4, 3, shape) for shape in shapes]
    return [np.asarray(value, np.float32) for value in values]


def exact(candidate: Candidate, size: int, step: int, wide: bool) -> list[NDArray[np.floating]]:
    """The expected result: values as they are sent, summed pairwise, and rounded to the type that is sent back.

    With two ranks over MPI, each computes the sum itself, and nothing is sent back.
    """
    wire = np.float64 if wide else WIRE[candidate.compression]
    adds_in = wire if candidate.kind == "horovod" or wide else np.float32
    back = adds_in if size == 2 else wire
    found = []
    for index in range(len(SHAPES) + 1):
        terms = [numbers(rank, step)[index] for rank in range(size)]
        if index == len(SHAPES):
            found.append(np.sum(terms, axis=0, dtype=np.float64 if wide else np.float32))
            continue
        sums = [values.astype(wire).astype(adds_in) for values in terms]
        while len(sums) > 1:  # neighbours first
            sums = [(first + second).astype(adds_in) for first, second in zip(sums[::2], sums[1::2], strict=True)]
        found.append(sums[0].astype(back).astype(np.float64 if wide else np.float32))
    return found


def compared(candidate: Candidate, group: Group, wide: bool) -> dict[str, object]:
    """Compare three different sums inside TensorFlow functions; also whether they are bitwise equal on all ranks."""
    pieces = Pieces([keras.Variable(np.zeros(shape), dtype="float64" if wide else "float32") for shape in SHAPES])
    reducer = KerasReducerFactory(pieces).open(candidate, group)

    @tf.function
    def summed(gradients: list[tf.Tensor], slots: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        sums = reducer.sum(pieces.pack_with(gradients, {LOSS: slots[0], WEIGHT: slots[1]}))
        return pieces.unpack(sums), sums[-1]

    differences, same = [], True
    for step in range(3):
        *mine, two = numbers(group.rank, step)
        gradients, slots = summed([tf.constant(value) for value in mine], tf.constant(two))
        square = sum(float(tf.reduce_sum(tf.square(tf.cast(gradient, tf.float64)))) for gradient in gradients)
        assert abs(float(slots[SQUARE]) / square - 1) < 1e-5
        found = [np.array(total) for total in (*gradients, tf.stack([slots[LOSS], slots[WEIGHT]]))]
        for index, (total, wanted) in enumerate(zip(found, exact(candidate, group.size, step, wide), strict=True)):
            size_of_terms = sum(np.abs(numbers(rank, step)[index]) for rank in range(group.size))
            differences.append(float(np.max(np.abs(total - wanted) / size_of_terms)))
        checksums = group.allgather([crc32(total.tobytes()) for total in found], "compare the sums")
        same = same and all(checksum == checksums[0] for checksum in checksums)
    reducer.close()
    return {"difference": max(group.allgather(max(differences), "compare")), "same": same}


def main() -> None:
    """Check each candidate, and one in double precision."""
    world = connect()
    found = {
        candidate.name: compared(candidate, world.data, wide=False)
        for candidate in EVERY_CANDIDATE
        if candidate.way != "overlap" and candidate.kind in ("mpi", "horovod") and candidate.compression in WIRE
    }
    for name in ("mpi-node", "mpi-flat", "horovod-flat"):
        found[f"{name} in float64"] = compared(Candidate.parse(name), world.data, wide=True)
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Sums known numbers by every way of exchanging TensorFlow gradients; rank 0 prints what differs from the exact sum."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import tensorflow as tf

from hpctrain.reduce.choice import EVERY_CANDIDATE, Candidate
from hpctrain.reduce.tensorflow_flat import ROW
from hpctrain.reduce.tensorflow_reducer import open_reducer
from hpctrain.comm.world import connect

ROWS = 1001
WIRE = {"none": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def numbers(rank: int, step: int) -> np.ndarray:
    """float32[rows, 16] of very different sizes; the last row has more digits than 16 bits hold."""
    random = np.random.default_rng((rank, step))
    values = random.normal(size=(ROWS, ROW)) * 10.0 ** random.integers(-4, 3, (ROWS, ROW))
    return values.astype(np.float32)


def exact(candidate: Candidate, size: int, step: int) -> np.ndarray:
    """What all ranks must hold: values as they travel, added up, rounded to what travels back."""
    wire = WIRE[candidate.compression]
    everything = [numbers(rank, step) for rank in range(size)]
    adds_in = wire if candidate.kind == "horovod" else np.float32
    total = np.zeros((ROWS, ROW), adds_in)
    for values in everything:
        total = (total + values.astype(wire).astype(adds_in)).astype(adds_in)
    total = total.astype(wire).astype(np.float32)
    total[-1] = np.sum([values[-1] for values in everything], axis=0, dtype=np.float32)
    return total


def main() -> None:
    """Three different sums by each candidate, and whether all ranks hold the same bits."""
    world = connect()
    found = {}
    for candidate in EVERY_CANDIDATE:
        if candidate.way == "overlap" or candidate.kind == "none":
            continue
        reducer = open_reducer(candidate, world.data, ROWS * ROW)
        differences, same = [], True
        for step in range(3):
            total = np.asarray(reducer.sum(tf.constant(numbers(world.rank, step))))
            wanted = exact(candidate, world.size, step)
            size_of_terms = sum(np.abs(numbers(rank, step)) for rank in range(world.size))
            differences.append(float(np.max(np.abs(total - wanted) / size_of_terms)))
            checksums = world.data.allgather(total.tobytes().hex(), "compare the sums")
            same = same and len(set(checksums)) == 1
        reducer.close()
        found[candidate.name] = {"difference": max(world.data.allgather(max(differences), "compare")), "same": same}
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""All ranks train 1.5 epochs on a shared file, with worker processes, and compare which samples they saw."""

import os
import sys
from itertools import islice

import numpy as np

from hpctrain.comm.world import connect
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData, ValidationData
from hpctrain.data.samples import Recipe


def noise(sample, rng):
    return {
        "id": sample["id"],
        "x": sample["x"] + rng.normal(),
        "in_mpi": any(name.startswith("OMPI_") for name in os.environ),
    }


def main() -> None:
    path, shuffle, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    group = connect().data
    dataset = open_dataset(path)
    assert len(set(group.allgather(dataset.fingerprint(), "compare the data"))) == 1
    order = Order(len(dataset), 22, seed=5, shuffle=shuffle, block_samples=8)
    data = TrainingData(dataset, order, group.rank, group.size, 2, workers=workers, recipe=Recipe(noise, seed=5))
    digest = []
    for batch in islice(data.starting_at(0, 2), order.batches_per_epoch * 3 // 2):
        pieces = [
            (int(i), float(x)) for piece in batch.micro_batches for i, x in zip(piece["id"], piece["x"], strict=True)
        ]
        assert [i for i, _ in pieces] == batch.sample_ids.tolist()
        assert not workers or not any(piece["in_mpi"].any() for piece in batch.micro_batches)
        everything = [pair for part in group.allgather(pieces, "compare samples") for pair in part]
        assert [i for i, _ in everything] == order.batch_indices(batch.epoch, batch.index).tolist()
        digest.append(everything)
    data.close()
    held = [int(i) for batch in ValidationData(dataset, 7, group.rank, group.size) for i in batch["id"]]
    assert [i for part in group.allgather(held, "compare validation") for i in part] == list(range(len(dataset)))
    if group.rank == 0:
        values = np.array([x for step in digest for _, x in step])
        print(f"{len(values)} samples {values.tobytes().hex()[:64]} {values.sum():.12f}")


if __name__ == "__main__":
    main()

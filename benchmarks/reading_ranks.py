"""Program of ``benchmarks.reading`` on the ranks: reads epochs of samples as training does."""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from hpctrain.bench.ranks import write_rows
from hpctrain.comm.world import World, connect
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData

BATCH = 256
"""Samples per batch of a rank."""
BUFFER = 10_000
"""Size of WebDataset's shuffle buffer in samples, equal to a row group."""


def ours(address: str, world: World, epochs: int) -> Iterator[int]:
    """Yields the number of samples of each batch, shuffled in blocks of a row group; 0 at the end of an epoch."""
    dataset = open_dataset(address, ["x", "y"])
    order = Order(len(dataset), BATCH * world.size, seed=0, shuffle="block", block_samples=BUFFER)
    data = TrainingData(dataset, order, world.rank, world.size, prefetch=2)
    try:
        batches = data.starting_at(0, 0)
        for _ in range(epochs):
            for _ in range(order.batches_per_epoch):
                yield sum(len(batch["y"]) for batch in next(batches).micro_batches)
            yield 0
    finally:
        data.close()


def webdataset(address: str, world: World, epochs: int) -> Iterator[int]:
    """Like ``ours``, from WebDataset; each rank reads different shards and caches them on disk."""
    import webdataset

    def decoded(sample: dict[str, Any]) -> tuple[Any, int]:
        return np.frombuffer(sample["bin"], np.float32, len(sample["bin"]) // 4 - 2), int.from_bytes(
            sample["bin"][-8:], "little"
        )

    def mine(urls: Iterator[Any]) -> Iterator[Any]:
        return (url for index, url in enumerate(urls) if index % world.size == world.rank)

    cache = os.environ["READING_CACHE"]
    os.makedirs(cache, exist_ok=True)
    shards = webdataset.WebDataset(address, nodesplitter=mine, shardshuffle=100, cache_dir=cache, seed=0)
    batches = shards.shuffle(BUFFER).map(decoded).batched(BATCH)
    for _ in range(epochs):
        for _, y in batches:
            yield len(y)
        yield 0


def streaming(address: str, world: World, epochs: int) -> Iterator[int]:
    """Like ``ours``, from MosaicML Streaming, which uses the ranks of torch.distributed."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = world.everyone.allgather(door.getsockname()[1])[0]
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    os.environ.update({name: str(each) for name, each in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from torch.utils.data import DataLoader

    library: Any = importlib.import_module("streaming")
    data = library.StreamingDataset(
        remote=address, local=os.environ["READING_CACHE"], shuffle=True, batch_size=BATCH, shuffle_seed=0
    )
    batches: Any = DataLoader(data, batch_size=BATCH)
    for _ in range(epochs):
        for batch in batches:
            yield len(batch["y"])
        yield 0


READERS = {"webdataset": webdataset, "streaming": streaming}
"""Readers of contenders other than hpctrain."""


def main() -> None:
    """Measures; rank 0 writes the row."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--kind", "--address", "--out"):
        parser.add_argument(name, required=True)
    for name in ("--epochs", "--rows"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    world = connect()
    read = READERS.get(args.kind, ours)
    world.everyone.barrier()
    rates, sizes, samples, begin = [], [], 0, time.perf_counter()
    for count in read(args.address, world, args.epochs):
        samples += count
        if count:
            continue
        seen = sum(world.everyone.allgather(samples))
        assert abs(seen - args.rows) < BATCH * world.size, f"{seen} samples in an epoch of {args.rows}"
        rates.append(seen / (time.perf_counter() - begin))
        sizes.append(max(world.everyone.allgather(psutil.Process().memory_full_info().uss)))
        samples, begin = 0, time.perf_counter()
    if world.rank == 0:
        write_rows(args.out, [{"kind": args.kind, "samples_per_s": rates, "uss_bytes": sizes}])


if __name__ == "__main__":
    main()

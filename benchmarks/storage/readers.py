"""Readers that yield an accelerator's batches without end: uint8 arrays [batch, record_bytes] in memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.storage.workloads import Workload
from hpctrain.data.dataset import Dataset
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData

Batches = Iterator[NDArray[np.uint8]]


@dataclass(frozen=True)
class Feed:
    """What one accelerator reads."""

    workload: Workload
    folder: Path
    """Of the files."""
    rank: int
    size: int
    """Number of accelerators."""
    workers: int
    """Worker processes per accelerator, for readers that have them."""
    port: int
    """A free port, for Streaming's process group."""


def nothing(feed: Feed) -> Batches:
    """Yields one array again and again: the limit."""
    batch = np.zeros((feed.workload.batch, feed.workload.record_bytes), np.uint8)
    while True:
        yield batch


def ours(feed: Feed, dataset: Dataset) -> Batches:
    """Reads with hpctrain's data layer in the order of ``data.shuffle: full``, two batches ahead."""
    order = Order(len(dataset), feed.workload.batch * feed.size, drop_last=True)
    data = TrainingData(dataset, order, feed.rank, feed.size, prefetch=2)
    try:
        for batch in data.starting_at(0, 0):
            yield batch.micro_batches[0]["x"]
    finally:
        data.close()


def from_hdf5(feed: Feed) -> Batches:
    """hpctrain, from a packed HDF5 file."""
    return ours(feed, open_dataset(str(feed.folder / "train.h5")))


def from_tars(feed: Feed) -> Batches:
    """hpctrain, from the tars that WebDataset reads."""
    return ours(feed, open_dataset(str(feed.folder / "*.tar"), decode=lambda files: {"x": array(files["bin"])}))


def array(content: bytes) -> NDArray[np.uint8]:
    """Views bytes as an array."""
    return np.frombuffer(content, np.uint8)


def stacked(contents: list[Any]) -> Any:
    """Makes a tensor of a batch from the bytes of its samples; worker processes send tensors in shared memory."""
    import torch

    return torch.from_numpy(np.stack([array(each) for each in contents]))


def webdataset(feed: Feed) -> Batches:
    """WebDataset, which draws tars with replacement, as its documentation advises for training on several nodes."""
    import webdataset

    tars = sorted(map(str, feed.folder.glob("*.tar")))
    samples = webdataset.WebDataset(tars, resampled=True, shardshuffle=False, nodesplitter=None, seed=feed.rank)
    batches = samples.shuffle(feed.workload.buffer).to_tuple("bin").map(lambda files: files[0])
    loader = webdataset.WebLoader(
        batches.batched(feed.workload.batch, collation_fn=stacked, partial=False),
        batch_size=None,
        **worker_options(feed),
    )
    for batch in loader:
        yield batch.numpy()


def streaming(feed: Feed) -> Batches:
    """MosaicML Streaming, shards on a local disk."""
    ranks = {"RANK": feed.rank, "LOCAL_RANK": feed.rank, "WORLD_SIZE": feed.size, "LOCAL_WORLD_SIZE": feed.size}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": feed.port}
    os.environ.update({name: str(each) for name, each in (ranks | place).items()})
    library: Any = importlib.import_module("streaming")
    data = library.StreamingDataset(
        local=str(feed.folder / "mds"), shuffle=True, batch_size=feed.workload.batch, shuffle_seed=0
    )
    yield from loaded(feed, data, collate_fn=lambda samples: stacked([sample["x"] for sample in samples]))


def torch_hdf5(feed: Feed) -> Batches:
    """PyTorch's DataLoader and h5py, the file of ``from_hdf5``."""
    import h5py
    import torch
    from torch.utils.data import DistributedSampler

    class Samples(torch.utils.data.Dataset[Any]):
        file: Any = None  # opened by each worker process: h5py's files do not survive a fork

        def __len__(self) -> int:
            return feed.workload.samples

        def __getitem__(self, index: int) -> Any:
            if self.file is None:
                self.file = h5py.File(feed.folder / "train.h5", "r")
            return torch.from_numpy(self.file["x"][index])

    data = Samples()
    sampler: Any = DistributedSampler(data, feed.size, feed.rank, shuffle=True)
    return loaded(feed, data, sampler=sampler)


def worker_options(feed: Feed) -> dict[str, Any]:
    """Options of a DataLoader; an accelerator is a spawned process, whose default is to spawn workers."""
    return {"num_workers": feed.workers, "multiprocessing_context": "fork" if feed.workers else None}


def loaded(feed: Feed, data: Any, **options: Any) -> Batches:
    """Yields epochs of a DataLoader without end."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(
        data,
        batch_size=feed.workload.batch,
        persistent_workers=feed.workers > 0,
        **worker_options(feed),
        drop_last=True,
        **options,
    )
    while True:
        for batch in loader:
            yield batch.numpy()


def tf_data(feed: Feed) -> Batches:
    """tf.data and TFRecord files, as in DLIO, which MLPerf Storage runs; it chooses its own number of threads."""
    import tensorflow as tf

    def parsed(examples: Any) -> Any:
        content = tf.io.parse_example(examples, {"x": tf.io.FixedLenFeature([], tf.string)})["x"]
        return tf.io.decode_raw(content, tf.uint8, fixed_length=feed.workload.record_bytes)

    mine = sorted(map(str, feed.folder.glob("*.tfrecord")))[feed.rank :: feed.size]
    files = tf.data.Dataset.from_tensor_slices(mine).shuffle(len(mine), seed=0).repeat()
    read = tf.data.TFRecordDataset(files, buffer_size=2**22, num_parallel_reads=tf.data.AUTOTUNE)
    examples = read.shuffle(feed.workload.buffer)
    batches = examples.batch(feed.workload.batch, drop_remainder=True).map(parsed, tf.data.AUTOTUNE)
    for batch in batches.prefetch(tf.data.AUTOTUNE):
        yield batch.numpy()


@dataclass(frozen=True)
class Reader:
    """A contender."""

    format: str
    """Format of its files, or empty."""
    batches: Callable[[Feed], Batches]
    module: str = "hpctrain"
    """Module that must be installed."""


READERS = {
    "none": Reader("", nothing),
    "hpctrain-hdf5": Reader("hdf5", from_hdf5),
    "hpctrain-tar": Reader("tar", from_tars),
    "webdataset": Reader("tar", webdataset, "webdataset"),
    "streaming": Reader("mds", streaming, "streaming"),
    "torch-hdf5": Reader("hdf5", torch_hdf5, "torch"),
    "tf.data": Reader("tfrecord", tf_data, "tensorflow"),
}
"""Contenders by name."""

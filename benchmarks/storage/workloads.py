"""Workloads of MLPerf Storage on H100s, and generated files with their records, in the format of each reader."""

from __future__ import annotations

import importlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Workload:
    """Numbers of ``configs/dlio/workload/*_h100.yaml`` in github.com/mlcommons/storage (v1.0; v2.0 has the same)."""

    name: str
    batch: int
    """Samples per step of an accelerator (``reader.batch_size``)."""
    record_bytes: int
    """Bytes of a sample (``record_length_bytes``); its standard deviation is left out."""
    compute_s: float
    """Seconds of a step on the accelerator (``computation_time``)."""
    file_samples: int
    """Samples in a TFRecord file (``num_samples_per_file``)."""
    utilisation: float
    """Lowest accelerator utilisation that counts (``metric.au``)."""
    buffer: int
    """Samples in the shuffle buffer of readers that stream (``shuffle_size``; a batch where none is given)."""
    samples: int
    """Samples that are generated unless ``--samples`` says otherwise: a small part of the published number."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes that one fully used accelerator reads per second."""
        return self.batch * self.record_bytes / self.compute_s


WORKLOADS = {
    "resnet50": Workload("resnet50", 400, 114_660, 0.224, 1251, 0.90, 400, 4 * 1251),
    "cosmoflow": Workload("cosmoflow", 1, 2_828_486, 0.0035, 1, 0.70, 2, 256),
}
SHARD_BYTES = 2**26
"""Size of a tar and of a shard of Streaming; 64 MiB is Streaming's default."""


def record(index: int, size: int) -> bytes:
    """Makes a sample: its index in 8 bytes, then noise."""
    return index.to_bytes(8, "little") + np.random.default_rng(index).bytes(size - 8)


def records(workload: Workload, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Makes samples in order."""
    return (record(i, workload.record_bytes) for i in range(begin, workload.samples if end is None else end))


def ranges(workload: Workload, size: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of samples in files of ``size`` samples."""
    return ((at, min(at + size, workload.samples)) for at in range(0, workload.samples, size))


def fill_hdf5(workload: Workload, folder: Path) -> None:
    """Writes one contiguous array, as ``hpctrain data pack`` does."""
    with h5py.File(folder / "train.h5", "w") as file:
        x = file.create_dataset("x", (workload.samples, workload.record_bytes), np.uint8)
        for index, content in enumerate(records(workload)):
            x[index] = np.frombuffer(content, np.uint8)


def fill_tar(workload: Workload, folder: Path) -> None:
    """Writes WebDataset tars."""
    for begin, end in ranges(workload, max(SHARD_BYTES // workload.record_bytes, 1)):
        with tarfile.open(folder / f"{begin:09d}.tar", "w") as tar:
            for index, content in enumerate(records(workload, begin, end), begin):
                info = tarfile.TarInfo(f"{index:09d}.bin")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def fill_streaming(workload: Workload, folder: Path) -> None:
    """Writes shards of MosaicML Streaming."""
    streaming: Any = importlib.import_module("streaming")
    with streaming.MDSWriter(out=str(folder / "mds"), columns={"x": "bytes"}, size_limit=SHARD_BYTES) as writer:
        for content in records(workload):
            writer.write({"x": content})


def fill_tfrecord(workload: Workload, folder: Path) -> None:
    """Writes TFRecord files with one ``tf.train.Example`` per sample."""
    import tensorflow as tf

    for begin, end in ranges(workload, workload.file_samples):
        with tf.io.TFRecordWriter(str(folder / f"{begin:09d}.tfrecord")) as writer:
            for content in records(workload, begin, end):
                value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))
                example = tf.train.Example(features=tf.train.Features(feature={"x": value}))
                writer.write(example.SerializeToString())


FILLING: dict[str, Callable[[Workload, Path], None]] = {
    "hdf5": fill_hdf5,
    "tar": fill_tar,
    "mds": fill_streaming,
    "tfrecord": fill_tfrecord,
}
"""Functions that write the samples, by format."""


def drop_pages(folder: Path) -> None:
    """Drops the files from the page cache of this node."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def indices(batch: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns the samples' indices from a batch, [B, record_bytes]."""
    return np.ascontiguousarray(batch[:, :8]).view("<i8").ravel()

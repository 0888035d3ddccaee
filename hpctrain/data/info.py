"""Facts about a dataset: its contents, read speed, and the tables it comes from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.dataset import Dataset
from hpctrain.data.formats.hdf5 import Hdf5Dataset
from hpctrain.data.formats.records import RecordDataset
from hpctrain.data.formats.sources import CACHE_BYTES, CalledDataset, ConcatDataset, open_dataset
from hpctrain.data.formats.table_dataset import TableDataset, TableRows
from hpctrain.data.packing.pack_source import packed_notes
from hpctrain.data.packing.read import KINDS, decode_for
from hpctrain.system.array_types import Ints

BATCH = 256


def describe(source: str, seconds: float, kind: str | None = None) -> dict[str, Any]:
    """Facts about a dataset in files, as JSON values.

    Args:
        source: a path or a pattern.
        seconds: maximum duration of each speed measurement, which reads each sample at most once.
        kind: ``netcdf`` to decode arrays; by default taken from the suffix.
    """
    kind = kind or KINDS.get(Path(source).suffix.lower())
    dataset = open_dataset(source, decode=decode_for(kind))
    files = dataset.parts if isinstance(dataset, ConcatDataset) else [dataset]
    layouts = {name: layout(files, name) for name in dataset.fields}
    sample_bytes = sum(field.num_bytes for field in dataset.fields.values())
    rng = np.random.default_rng(0)
    return {
        "source": source,
        "files": len(files),
        "samples": len(dataset),
        "bytes_per_sample": sample_bytes,
        "fields": [
            {"name": name, "dtype": field.dtype.name, "shape": list(field.shape), "layout": layouts[name]}
            for name, field in dataset.fields.items()
        ],
        "fingerprint": dataset.fingerprint(),
        "notes": common_notes([file.path for file in files if isinstance(file, Hdf5Dataset)]),
        "random": speed(dataset, lambda begin, end: rng.integers(0, len(dataset), end - begin), seconds, sample_bytes),
        "sequential": speed(dataset, np.arange, seconds, sample_bytes),
        "hints": hints(set(layouts.values()), len(dataset) * sample_bytes),
    }


def common_notes(paths: Sequence[Path | str]) -> dict[str, Any]:
    """The notes that are the same in all files."""
    first, *others = [packed_notes(path) for path in paths] or [{}]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def layout(files: list[Dataset] | Any, name: str) -> str:
    """The storage layout of an array: that of all HDF5 files, ``mixed`` if they differ, ``table`` if there are none."""
    layouts = {file.readers[name].layout for file in files if isinstance(file, Hdf5Dataset)}
    if not layouts:
        return "table"
    return layouts.pop() if len(layouts) == 1 else "mixed"


def speed(dataset: Dataset, indices: Callable[[int, int], Ints], seconds: float, sample_bytes: int) -> dict[str, float]:
    """Measure samples and bytes per second in batches of 256 after a warm-up read; the page cache is not cleared.

    Args:
        dataset: the dataset to read.
        indices: indices(begin, end) returns the samples to read for these positions.
        seconds: how long to measure.
        sample_bytes: bytes per sample.
    """
    dataset.read(np.arange(min(1, len(dataset))))  # excludes the time to open files and import modules
    begin = time.perf_counter()
    samples = 0
    while samples < len(dataset) and (not samples or time.perf_counter() - begin < seconds):
        batch = indices(samples, min(samples + BATCH, len(dataset)))
        dataset.read(batch)
        samples += len(batch)
    rate = samples / (time.perf_counter() - begin)
    return {"samples_per_s": rate, "bytes_per_s": rate * sample_bytes}


def hints(layouts: set[str], num_bytes: int) -> list[str]:
    """Advice for faster reading."""
    if layouts == {"contiguous"}:
        return []
    text = "arrays that are not contiguous are read block by block through the HDF5 library"
    if num_bytes > CACHE_BYTES:
        return [
            f"{text}, each block again and again in random order: use data.shuffle block, or repack: hpctrain data pack"
        ]
    return [f"{text}, once: after the first epoch they are in memory"]


MOST_SOURCES = 100
"""Limit on the sources that a run's record lists; each of very many packed files may come from a different table."""


def sources_of(dataset: Dataset) -> list[dict[str, Any]]:
    """The dataset's source tables in order, each with its ``address`` and the entries of ``Table.record``.

    Args:
        dataset: any dataset. Tables, and files that ``hpctrain data pack`` made from tables (listed as ``packed``),
            have source tables; others have none.
    """
    found = {json.dumps(each): each for each in _sources(dataset)}
    return [{"address": str(each["uri"]), **each} for each in list(found.values())[:MOST_SOURCES]]


def _sources(dataset: Any) -> list[dict[str, Any]]:
    if isinstance(dataset, CalledDataset):
        return _sources(dataset.dataset)
    if isinstance(dataset, TableDataset):
        return [dataset.table.record(len(dataset))]
    if isinstance(dataset, RecordDataset) and isinstance(dataset.records, TableRows):
        return [dataset.records.table.record(len(dataset))]
    if isinstance(dataset, ConcatDataset):
        return [each for part in dataset.parts for each in _sources(part)]
    if not isinstance(dataset, Hdf5Dataset):
        return []
    return [{**source, "packed": str(dataset.path)} for source in packed_notes(dataset.path).get("sources", ())]

"""Measures how fast random samples are read, and whether prefetching hides it.

All readers read the same samples of the same data, in turn within each round, from the page cache: this compares the
CPU work of reading, not the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.bench.ranks import existing_folder
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.packing.pack_source import from_dataset
from hpctrain.data.packing.write import write_hdf5
from hpctrain.data.pipeline import TrainingData
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text
from hpctrain.system.array_types import Ints
from hpctrain.system.quantities import positive

Read = Callable[[Ints], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--samples", type=positive, default=32768, help="samples in the file (default 32768)")
    parser.add_argument("--sample-bytes", type=positive, default=3072, help="size of a sample (default 3072)")
    parser.add_argument("--batch", type=positive, default=256, help="samples read at a time (default 256)")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds in which all readers take turns (default 5)")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of each reader's turn (default 0.3)")
    parser.add_argument("--step-batch", type=positive, default=2048, help="samples per simulated step (default 2048)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time such a step computes (default 20)")
    parser.add_argument("--steps", type=positive, default=200, help="simulated steps (default 200)")
    parser.add_argument(
        "--folder",
        type=existing_folder,
        help="a folder on the disk to measure (default: the system's for temporary files)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = make_file(Path(folder), args.samples, args.sample_bytes)
        rates = reading(path, args.samples, args.batch, args.rounds, args.seconds)
        waits = [waiting(path, args.step_batch, prefetch, args.step_ms, args.steps) for prefetch in (0, 2)]
    slow = rates["h5py, one by one"]
    rows = [{"reader": name, "samples_per_s": rate, "ratio_to_h5py": rate / slow} for name, rate in rates.items()]
    if args.json:
        foreign_text.show(json.dumps({"rows": rows, "waits": waits}))
    else:
        print_tables(rows, waits)
    return ExitCode.DONE


def make_file(folder: Path, samples: int, sample_bytes: int) -> Path:
    """Writes random bytes to two files: contiguous, and in compressed chunks of 64 samples. Returns the first path."""
    values = np.random.default_rng(0).integers(0, 256, (samples, sample_bytes), dtype=np.uint8)
    path = folder / "contiguous.h5"
    write_hdf5(path, from_dataset(open_dataset({"x": values})))
    write_hdf5(folder / "gzip.h5", from_dataset(open_dataset({"x": values})), chunk_samples=64, compression="gzip")
    return path


def reading(path: Path, samples: int, batch: int, rounds: int, seconds: float) -> dict[str, float]:
    """Median samples per second of each reader, for samples in random order."""
    with h5py.File(path) as file, h5py.File(path.with_name("gzip.h5")) as packed:
        stored = file["x"]
        readers: Mapping[str, Read] = {
            "h5py, one by one": lambda indices: [stored[index] for index in indices],
            "h5py, sorted list": lambda indices: stored[np.unique(indices)],
            "h5py, gzip, one by one": lambda indices: [packed["x"][index] for index in indices],
            "hpctrain": open_dataset(path).read,
            "hpctrain, gzip": open_dataset(path.with_name("gzip.h5")).read,
            "array in memory": open_dataset({"x": stored[:]}).read,
        }
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(rounds):
            for name, read in readers.items():
                rates[name].append(rate(read, Order(samples, batch, seed=number), seconds))
    return {name: statistics.median(values) for name, values in rates.items()}


def rate(read: Read, order: Order, seconds: float) -> float:
    """Samples per second of a reader, over at least one batch."""
    begin = time.perf_counter()
    count = 0
    for batch in range(10**9):
        indices = order.batch_indices(0, batch % order.batches_per_epoch)
        read(indices)
        count += len(indices)
        if time.perf_counter() - begin > seconds:
            break
    return count / (time.perf_counter() - begin)


def waiting(path: Path, batch: int, prefetch: int, step_ms: float, steps: int) -> dict[str, float]:
    """How long steps with this much compute wait for batches: fraction of the time, and median."""
    dataset = open_dataset(path)
    data = TrainingData(dataset, Order(len(dataset), batch), rank=0, size=1, prefetch=prefetch)
    batches = data.starting_at(0, 0)
    next(batches)
    waits = []
    begin = time.perf_counter()
    for _ in range(steps):
        compute(step_ms / 1000)
        asked = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked)
    total = time.perf_counter() - begin
    data.close()
    share, median_ms = sum(waits) / total, statistics.median(waits) * 1000
    return {"prefetch": prefetch, "batch": batch, "step_ms": step_ms, "wait_share": share, "wait_ms": median_ms}


def compute(seconds: float) -> None:
    """Multiplies matrices, as a model does: other threads can run, but compete for the CPU."""
    matrix = np.ones((128, 128), dtype=np.float32)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def print_tables(rows: list[dict[str, Any]], waits: list[dict[str, Any]]) -> None:
    """Prints the results as tables."""
    speeds = ([one["reader"], f"{one['samples_per_s']:,.0f}", f"{one['ratio_to_h5py']:.1f}x"] for one in rows)
    foreign_text.table("reading", ["random samples", "samples/s", "to h5py one by one"], speeds)
    hidden = ([str(one["prefetch"]), f"{one['wait_ms']:.3f} ms", f"{one['wait_share']:.2%}"] for one in waits)
    headers = [f"prefetched, of {waits[0]['batch']} samples a step", "waiting for data", "share of the time"]
    foreign_text.table("prefetch", headers, hidden)

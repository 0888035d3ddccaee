"""Measures how long a checkpoint stalls training and how fast it is written and read, against copies and raw writes.

All contenders save the same tensors to the same folder and take turns within each round, because a disk's speed varies
more from minute to minute than the contenders differ. Each save ends with an fsync. The baseline's own speed is
printed next to each ratio, which means little without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.bench.ranks import existing_folder
from hpctrain.checkpoint.format.durable_files import BLOCK_BYTES, crc32, created, write_at
from hpctrain.checkpoint.format.paced_write import threads
from hpctrain.checkpoint.saver import Saver, array_tensors
from hpctrain.checkpoint.store import CheckpointStore, open_saver
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text
from hpctrain.system.array_types import Bytes
from hpctrain.system.quantities import positive

Arrays = Mapping[str, NDArray[np.float32]]
Other = Callable[[Path], float | None]
"""Saves to a path and syncs it; returns the seconds of the stall, or None if it is the whole save."""
COUNTS = (160, 5000)
"""Numbers of tensors in the state: a few large ones, or many small ones."""
COLUMNS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--mb", type=positive, default=400, help="state in MB (default 400)")
    parser.add_argument("--rounds", type=positive, default=9, help="turns of all contenders (default 9)")
    where = "a folder on the disk in question (default: here)"
    parser.add_argument("--folder", type=existing_folder, default=Path(), help=where)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    rows = measured(args, lambda arrays: {})
    if args.json:
        foreign_text.show(json.dumps(rows))
    else:
        print_table(rows)
    return ExitCode.DONE


def measured(args: argparse.Namespace, others: Callable[[Arrays], Mapping[str, Other]]) -> list[dict[str, Any]]:
    """Measures all states; ``others`` makes further contenders, used by ``benchmarks.checkpoint``."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-checkpoint-") as folder:
        for count in COUNTS:
            arrays = make_state(count, args.mb)
            label = f"{count} tensors, {args.mb} MB"
            rows += [{"state": label, **row} for row in measure(arrays, Path(folder), args.rounds, others(arrays))]
    return rows


def make_state(count: int, megabytes: int) -> Arrays:
    """Makes random float32 tensors of equal shape."""
    rng = np.random.default_rng(0)
    shape = (max(1, megabytes * 1_000_000 // (4 * COLUMNS * count)), COLUMNS)
    return {f"model/layer{index}/kernel": rng.random(shape, dtype=np.float32) for index in range(count)}


def measure(arrays: Arrays, folder: Path, rounds: int, others: Mapping[str, Other]) -> list[dict[str, Any]]:
    """Measures median seconds of each contender, and medians over the rounds of ratios to the baselines."""
    buffers = {name: np.zeros_like(array) for name, array in arrays.items()}
    block = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
    store = CheckpointStore(folder / "store")
    saver = open_saver(store)
    tensors = array_tensors(arrays, {})
    saver.prepare(tensors)
    times: dict[str, list[float]] = {}

    def take(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        times.setdefault(name, []).append(time.perf_counter() - begin)

    for number in range(rounds + 1):
        take("stall: memcpy", lambda: copy(arrays, buffers))
        stall, total = save(saver, tensors, number)
        times.setdefault("stall: hpctrain", []).append(stall)
        times.setdefault("write: hpctrain", []).append(total - stall)
        take("write: raw + fsync", lambda: write_raw(folder / "raw", block))
        for name, other in others.items():
            begin = time.perf_counter()
            if (stalled := other(folder / "other")) is not None:
                times.setdefault(f"stall: {name}", []).append(stalled)
            times.setdefault(f"write: {name} + fsync", []).append(time.perf_counter() - begin)
            remove(folder / "other")
        take("read: raw + checksum", lambda: read_raw(folder / "raw"))
        take("read: hpctrain", store.load)
        for path in (folder / "raw", store.path):
            remove(path)
    saver.close()
    for seconds in times.values():
        del seconds[0]  # the first round warms up
    return [row(name, seconds, times, block.size) for name, seconds in times.items()]


BASELINES = {"stall": "stall: memcpy", "write": "write: raw + fsync", "read": "read: raw + checksum"}
"""Baseline by first word of the measurement."""


def row(name: str, seconds: list[float], times: Mapping[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """Makes one row of the table."""
    result: dict[str, Any] = {
        "what": name,
        "seconds": statistics.median(seconds),
        "mb_per_s": num_bytes / 1e6 / statistics.median(seconds),
    }
    name_of_baseline = BASELINES[name.partition(":")[0]]
    if name != name_of_baseline:
        baseline = times[name_of_baseline]
        ratio = statistics.median(base / own for own, base in zip(seconds, baseline, strict=True))
        speed = num_bytes / 1e6 / statistics.median(baseline)
        result |= {"baseline": name_of_baseline, "baseline_mb_per_s": speed, "speed_ratio": ratio}
    return result


def save(saver: Saver, tensors: list[Any], step: int) -> tuple[float, float]:
    """Saves; returns the seconds of the stall, and the seconds until the checkpoint was durable."""
    begin = time.perf_counter()
    saver.begin(tensors, step, {})
    stall = time.perf_counter() - begin
    saver.finish().path_or_raise()
    return stall, time.perf_counter() - begin


def copy(arrays: Arrays, buffers: Arrays) -> None:
    """Copies each tensor to existing memory, the minimum of any snapshot."""
    for name, array in arrays.items():
        np.copyto(buffers[name], array)


def write_raw(path: Path, data: Bytes) -> None:
    """Writes the bytes and syncs, with as many threads as a checkpoint uses."""
    with created(path) as descriptor, ThreadPoolExecutor(threads(data.size)) as workers:
        begins = range(0, data.size, BLOCK_BYTES)
        for done in [workers.submit(write_at, descriptor, data.data[at : at + BLOCK_BYTES], at) for at in begins]:
            done.result()
        os.fsync(descriptor)


def read_raw(path: Path) -> int:
    """Reads all bytes into memory; returns their checksum."""
    buffer = np.empty(path.stat().st_size, np.uint8)
    view, crc = buffer.data, 0
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, buffer.size, BLOCK_BYTES):
            file.readinto(view[begin : begin + BLOCK_BYTES])
            crc = crc32(view[begin : begin + BLOCK_BYTES], crc)
    return crc


def remove(path: Path) -> None:
    """Removes a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a table."""
    state = ""
    for one in rows:
        if one["state"] != state:
            state = one["state"]
            foreign_text.show(f"{state}\n  {'':28}{'seconds':>10}{'MB/s':>8}  speed vs.")
        baseline = (
            f"  {one['speed_ratio']:.2f} x {one['baseline']} ({one['baseline_mb_per_s']:.0f} MB/s)"
            if "baseline" in one
            else ""
        )
        foreign_text.show(f"  {one['what']:28}{one['seconds']:>10.4f}{one['mb_per_s']:>8.0f}{baseline}")

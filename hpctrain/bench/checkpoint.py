"""How long a checkpoint stops training, and how fast it is written and read, beside simpler ways.

All contenders save the same tensors to the same folder and take turns within each round, because the speed of a disk
changes more from minute to minute than they differ. Each ends with an fsync: what is not on the disk is not saved. A
ratio says little without the speed of the disk, which is that of the raw write: it is printed beside each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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

from hpctrain.bench.options import existing_folder
from hpctrain.checkpoint import CheckpointStore, Retention, Saver, array_tensors, open_saver
from hpctrain.checkpoint.format import BLOCK_BYTES, crc32, created, threads, write_block
from hpctrain.errors import ExitCode
from hpctrain.system import foreign_text

Arrays = Mapping[str, NDArray[np.float32]]
COUNTS = (160, 5000)
"""Tensors that the state is made of: a few large ones, and many small ones."""
COLUMNS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and for how long."""
    parser.add_argument("--mb", type=int, default=400, help="size of the state in MB (default 400)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which all contenders take turns (default 9)")
    parser.add_argument("--saves", type=int, default=50, help="saves over which memory is watched (default 50)")
    where = "a folder on the disk in question (default: here)"
    parser.add_argument("--folder", type=existing_folder, default=Path(), help=where)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-checkpoint-") as folder:
        for count in COUNTS:
            arrays = make_state(count, args.mb)
            label = f"{count} tensors, {args.mb} MB"
            # memory first: what other contenders free, the C library may keep
            growth = memory_growth(arrays, Path(folder), args.saves)
            rows += [{"state": label, **row} for row in measure(arrays, Path(folder), args.rounds)]
            rows.append({"state": label, "what": "memory", **growth})
    if args.json:
        foreign_text.show(json.dumps(rows))
    else:
        print_table(rows)
    return ExitCode.DONE


def make_state(count: int, megabytes: int) -> Arrays:
    """Random float32 tensors of equal shape."""
    rng = np.random.default_rng(0)
    shape = (max(1, megabytes * 1_000_000 // (4 * COLUMNS * count)), COLUMNS)
    return {f"model/layer{index}/kernel": rng.random(shape, dtype=np.float32) for index in range(count)}


def measure(arrays: Arrays, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Median seconds of each contender and the median over the rounds of the ratios that matter."""
    buffers = {name: np.zeros_like(array) for name, array in arrays.items()}
    block = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
    store = CheckpointStore(folder / "store")
    saver = open_saver(store)
    tensors = array_tensors(arrays, {})
    saver.prepare(tensors)
    torch = torch_contenders(arrays)
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
        for name, work in torch.items():
            stalled = work(folder / "torch", name, take)
            if stalled is not None:
                times.setdefault("stall: DCP async", []).append(stalled)
            remove(folder / "torch")
        take("read: raw + checksum", lambda: read_raw(folder / "raw"))
        take("read: hpctrain", store.load)
        for path in (folder / "raw", store.path):
            remove(path)
    saver.close()
    for seconds in times.values():
        del seconds[0]  # the first round warms up
    return [row(name, seconds, times, block.size) for name, seconds in times.items()]


BASELINES = {
    "stall: hpctrain": "stall: memcpy",
    "stall: DCP async": "stall: memcpy",
    "write: hpctrain": "write: raw + fsync",
    "write: torch.save + fsync": "write: raw + fsync",
    "write: DCP async + fsync": "write: raw + fsync",
    "read: hpctrain": "read: raw + checksum",
}


def row(name: str, seconds: list[float], times: Mapping[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """One line of the table."""
    result: dict[str, Any] = {
        "what": name,
        "seconds": statistics.median(seconds),
        "mb_per_s": num_bytes / 1e6 / statistics.median(seconds),
    }
    if name in BASELINES:
        baseline = times[BASELINES[name]]
        ratio = statistics.median(base / own for own, base in zip(seconds, baseline, strict=True))
        speed = num_bytes / 1e6 / statistics.median(baseline)
        result |= {"baseline": BASELINES[name], "baseline_mb_per_s": speed, "speed_ratio": ratio}
    return result


def save(saver: Saver, tensors: list[Any], step: int) -> tuple[float, float]:
    """Seconds of the stall, and until the checkpoint was durable."""
    begin = time.perf_counter()
    saver.begin(tensors, step, {})
    stall = time.perf_counter() - begin
    saver.finish().path_or_raise()
    return stall, time.perf_counter() - begin


def copy(arrays: Arrays, buffers: Arrays) -> None:
    """What any snapshot must do: each tensor's bytes, to memory that is there."""
    for name, array in arrays.items():
        np.copyto(buffers[name], array)


def write_raw(path: Path, data: NDArray[np.uint8]) -> None:
    """Nothing but the bytes and an fsync, by as many threads as a checkpoint takes."""
    with created(path) as descriptor, ThreadPoolExecutor(threads(data.size)) as workers:
        blocks = [(begin, min(data.size, begin + BLOCK_BYTES)) for begin in range(0, data.size, BLOCK_BYTES)]
        for done in [workers.submit(write_block, descriptor, data.data, *block) for block in blocks]:
            done.result()
        os.fsync(descriptor)


def read_raw(path: Path) -> int:
    """All bytes into memory, and their checksum."""
    buffer = np.empty(path.stat().st_size, np.uint8)
    view, crc = buffer.data, 0
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, buffer.size, BLOCK_BYTES):
            file.readinto(view[begin : begin + BLOCK_BYTES])
            crc = crc32(view[begin : begin + BLOCK_BYTES], crc)
    return crc


def torch_contenders(arrays: Arrays) -> dict[str, Callable[..., float | None]]:
    """torch.save and DCP, if torch is installed."""
    try:
        from hpctrain.bench.torch_checkpoint import contenders
    except ImportError:
        return {}
    return contenders(arrays)


def remove(path: Path) -> None:
    """A file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def memory_growth(arrays: Arrays, folder: Path, saves: int) -> dict[str, Any]:
    """Largest resident memory over many saves, less that before the first and less the one copy that staging is."""
    os.sync()
    before = resident_bytes()
    store = CheckpointStore(folder / "memory", keep=Retention(last=1))
    saver = open_saver(store)
    tensors = array_tensors(arrays, {})
    peak = 0
    for step in range(saves):
        saver.begin(tensors, step, {})
        saver.finish().path_or_raise()
        peak = max(peak, resident_bytes())
    saver.close()
    remove(store.path)
    state = sum(array.nbytes for array in arrays.values())
    return {"saves": saves, "beyond_one_copy_mb": (peak - before - state) / 1e6}


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def print_table(rows: list[dict[str, Any]]) -> None:
    """For people."""
    state = ""
    for one in rows:
        if one["state"] != state:
            state = one["state"]
            foreign_text.show(f"{state}\n  {'':28}{'seconds':>10}{'MB/s':>8}  speed beside")
        if one["what"] == "memory":
            foreign_text.show(
                f"  memory over {one['saves']} saves, beyond one copy of the state: {one['beyond_one_copy_mb']:.0f} MB"
            )
            continue
        beside = (
            f"  {one['speed_ratio']:.2f} x {one['baseline']} ({one['baseline_mb_per_s']:.0f} MB/s)"
            if "baseline" in one
            else ""
        )
        foreign_text.show(f"  {one['what']:28}{one['seconds']:>10.4f}{one['mb_per_s']:>8.0f}{beside}")

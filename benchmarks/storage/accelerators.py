"""Emulated accelerators: processes that take a batch, sleep as long as a step takes, and wait for one another."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.storage.readers import READERS, Batches, Feed
from benchmarks.storage.workloads import FILLING, Workload
from hpctrain.errors import RunFailed

WARM_UP = 4
"""Batches taken at once before the clock starts: they start workers and empty the queues of read-ahead batches."""
SETTLING_S = 1.0
"""Seconds of steps before the clock starts, in which a reader that is fast enough reads ahead again."""
AHEAD = 4
"""Batches that a reader may have read ahead at the end of a turn."""
LONGEST_S = 120.0
"""Longest wait for the other accelerators; starting several frameworks on a loaded machine takes some of it."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TOKENIZERS_PARALLELISM": "false"}
"""Of all processes: frameworks compute nothing here."""
processes = multiprocessing.get_context("spawn")


def utilisation(name: str, workload: Workload, folder: Path, size: int, workers: int, seconds: float) -> float:
    """Measures the share of time in which ``size`` accelerators compute: a step's seconds times steps, by elapsed time.

    Raises:
        RunFailed: a reader failed; its traceback is in the message.
    """
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    feed = Feed(workload, folder / READERS[name].format, 0, size, workers, port)
    together, results = processes.Barrier(size), processes.SimpleQueue()
    started = [
        processes.Process(target=accelerator, args=(name, replace(feed, rank=rank), seconds, together, results))
        for rank in range(size)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    found = [results.get() for _ in started if not results.empty()]
    if failed := next((each for each in found if isinstance(each, str)), None):
        raise RunFailed(f"{name} did not feed {size} accelerators:\n{failed}", "leave it out with --only")
    if len(found) < size:
        raise RunFailed(f"{name}: {size - len(found)} of {size} accelerators died", "leave it out with --only")
    return float(sum(found) / size)


def taken(workload: Workload, size: int, seconds: float) -> int:
    """Returns the largest number of samples that are read in a turn."""
    settling, measured = (math.ceil(each / workload.compute_s) for each in (SETTLING_S, seconds))
    return size * workload.batch * (WARM_UP + settling + measured + AHEAD)


def accelerator(name: str, feed: Feed, seconds: float, together: Any, results: Any) -> None:
    """Program of one accelerator; puts its utilisation, or a traceback.

    The first one whose time is over breaks the barrier, so all end after the same step.
    """
    try:
        batches = READERS[name].batches(feed)
        for _ in range(WARM_UP):
            require_whole(next(batches), feed.workload)
        together.wait(LONGEST_S)
        for _ in range(math.ceil(SETTLING_S / feed.workload.compute_s)):
            compute(batches, feed, together)
        steps, begin = 0, time.perf_counter()
        end = begin
        try:
            while end - begin < seconds:
                compute(batches, feed, together)
                steps, end = steps + 1, time.perf_counter()
        except threading.BrokenBarrierError:
            if end - begin < seconds / 2:
                raise
        together.abort()
        results.put(steps * feed.workload.compute_s / (end - begin))
    except BaseException:
        together.abort()
        results.put(traceback.format_exc())
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)  # without waiting for readers' threads


def compute(batches: Batches, feed: Feed, together: Any) -> None:
    """Takes a batch, computes, and waits for the other accelerators."""
    require_whole(next(batches), feed.workload)
    time.sleep(feed.workload.compute_s)
    together.wait(LONGEST_S)


def require_whole(batch: Any, workload: Workload) -> None:
    """Raises ValueError unless the batch has all its bytes."""
    if (batch.shape, batch.dtype.name) != ((workload.batch, workload.record_bytes), "uint8"):
        raise ValueError(f"a batch is {batch.dtype}{list(batch.shape)}")


def fill(kind: str, workload: Workload, folder: Path) -> None:
    """Writes the files of a format in a separate process, which frees a framework's memory.

    Raises:
        RunFailed: it failed.
    """
    process = processes.Process(target=FILLING[kind], args=(workload, folder))
    process.start()
    process.join()
    if process.exitcode:
        raise RunFailed(f"writing {kind} to {folder} failed", "see above; --folder needs space for all formats")

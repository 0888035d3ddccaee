"""Worker processes that read and transform samples: for transforms too heavy for one thread.

They are started afresh, never forked, because a fork of a process that uses MPI or a GPU is broken. Each opens the
dataset and imports the transform for itself; arrays in memory are shared, and results come back through shared memory.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.dataset_spec import describe
from hpctrain.data.reference import refer
from hpctrain.data.transform import Transform
from hpctrain.errors import RunFailed, UserError
from hpctrain.system import python
from hpctrain.system.anonymous_memory import SharedMemory, create, put, views

SLOTS = 2
"""Results of a worker under way: while the parent takes one, the worker makes the next."""
CLOSE_S = 1.0
"""How long a worker may take to end by itself."""
LAUNCHER_VARIABLES = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "MPI_", "I_MPI_", "PALS_")
"""A worker that imports mpi4py must not take itself for its parent's rank."""
IN_WORKER = "HPCTRAIN_DATA_WORKER"

Ids = NDArray[np.int64]


@dataclass
class Worker:
    """One process, and what is shared with it."""

    index: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    lines: io.BufferedReader
    slots: list[SharedMemory]

    def set_up(self, line: bytes) -> None:
        """Sends what it needs; waits until most of it is read where that is more than a socket's buffer holds."""
        try:
            self.channel.sendall(line)
        except OSError as error:
            raise self._death("started") from error

    def ask(self, slot: int, epoch: int, ids: Ids) -> None:
        """Lets it make these samples."""
        try:
            self.channel.sendall(json.dumps({"slot": slot, "epoch": epoch, "ids": ids.tolist()}).encode() + b"\n")
        except OSError:
            pass  # it has died, which is said where its answer is missed

    def take(self, slot: int, ids: Ids) -> Samples:
        """The samples it made; raises what kept it from making them."""
        try:
            line = self.lines.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._death(f"made samples {ids[:4].tolist()}{' and others' if len(ids) > 4 else ''}")
        answer = json.loads(line)
        if "what" in answer:
            raise UserError(answer["what"], answer["fix"])
        return {name: array.copy() for name, array in views(answer["arrays"], self.slots[slot]).items()}

    def _death(self, during: str) -> RunFailed:
        try:
            code = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RunFailed(
            f"data worker {self.index} (process {self.process.pid}) {how} while it {during}",
            "where memory ran out, use fewer data.workers, a smaller batch, or less data.prefetch_batches",
        )


class WorkerPool:
    """Workers that take turns, so that results come in order. Use ``start``."""

    def __init__(self, workers: list[Worker], payload: SharedMemory) -> None:
        self.workers = workers
        self.payload = payload
        self.closed = False

    def load(self, parts: Iterator[tuple[int, Ids]]) -> Generator[Samples, None, None]:
        """The samples of each (epoch, ids), in order, a few parts ahead in every worker."""
        seats = itertools.cycle([(worker, slot) for slot in range(SLOTS) for worker in self.workers])
        asked: deque[tuple[Worker, int, Ids]] = deque()
        for epoch, ids in parts:
            worker, slot = next(seats)
            if len(asked) == SLOTS * len(self.workers):
                yield self._take(asked)
            worker.ask(slot, epoch, ids)
            asked.append((worker, slot, ids))
        while asked:
            yield self._take(asked)

    def _take(self, asked: deque[tuple[Worker, int, Ids]]) -> Samples:
        worker, slot, ids = asked.popleft()
        return worker.take(slot, ids)

    def kill(self) -> None:
        """Ends the processes; a thread that waits for one gets an error."""
        for worker in self.workers:
            try:
                worker.channel.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended already
        deadline = time.monotonic() + CLOSE_S
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def close(self) -> None:
        """Ends the processes and frees what was shared with them. No thread may still use the pool."""
        if self.closed:
            return
        self.closed = True
        self.kill()
        for worker in self.workers:
            worker.lines.close()
            worker.channel.close()
            for slot in worker.slots:
                slot.close()
        self.payload.close()


def start(num_workers: int, dataset: Dataset, transform: Transform | None, seed: int) -> WorkerPool:
    """Starts the processes and sends them what they need.

    Raises:
        UserError: the dataset cannot be opened again elsewhere, or the transform cannot be imported.
        RunFailed: a process died at once.
    """
    if os.environ.get(IN_WORKER):
        raise UserError(
            "a data worker tried to start data workers of its own: it imported the main program to find the transform",
            'put what the program does under `if __name__ == "__main__":`, or the transform into a module of its own',
        )
    arrays: Samples = {}
    setup = {
        "dataset": describe(dataset, arrays),
        "transform": None if transform is None else refer(transform, "the transform"),
        "seed": seed,
        "path": [*filter(None, sys.path), os.getcwd()],
    }
    pool = WorkerPool([], create())
    try:
        line = json.dumps({**setup, "arrays": put(arrays, pool.payload)}).encode() + b"\n"
        for index in range(num_workers):
            pool.workers.append(start_worker(index, pool.payload))
        for worker in pool.workers:  # once all are starting, for each reads it only when it is up
            worker.set_up(line)
    except BaseException:
        pool.close()
        raise
    return pool


def start_worker(index: int, payload: SharedMemory) -> Worker:
    """One process."""
    ours, theirs = socket.socketpair()
    slots = [create() for _ in range(SLOTS)]
    descriptors = [theirs.fileno(), payload.descriptor, *(slot.descriptor for slot in slots)]
    given = python.environment()
    environment = {name: value for name, value in given.items() if not name.startswith(LAUNCHER_VARIABLES)}
    environment |= {name: "1" for name in (IN_WORKER, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    with theirs:
        process = subprocess.Popen(
            python.module("hpctrain.data.worker", *map(str, descriptors)),
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=descriptors,
        )
    return Worker(index, process, ours, ours.makefile("rb"), slots)

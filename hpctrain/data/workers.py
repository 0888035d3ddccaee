"""Worker processes that read and transform samples: for transforms too heavy for one thread.

They are started afresh, never forked, because a fork of a process that uses MPI or a GPU is broken. The dataset and the
transform are sent once, arrays in them through memory that all workers share; results come back through shared memory.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.shared_memory import SharedMemory, create
from hpctrain.data.transform import Transform
from hpctrain.errors import RunFailed, UserError

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
            raise self._death(ids)
        answer = json.loads(line)
        if "what" in answer:
            raise UserError(answer["what"], answer["fix"])
        described = answer["arrays"]
        num_bytes = max((offset + nbytes(dtype, shape) for _, dtype, shape, offset in described), default=0)
        memory = self.slots[slot].view(max(1, num_bytes))
        return {name: np.ndarray(shape, dtype, memory, offset).copy() for name, dtype, shape, offset in described}

    def _death(self, ids: Ids) -> RunFailed:
        try:
            code = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        samples = f"samples {ids[:4].tolist()}{' and others' if len(ids) > 4 else ''}"
        return RunFailed(
            f"data worker {self.index} (process {self.process.pid}) {how} while it made {samples}",
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
        UserError: the dataset or the transform cannot be sent.
    """
    if os.environ.get(IN_WORKER):
        raise UserError(
            "a data worker tried to start data workers of its own: it imported the main program to find the transform",
            'put what the program does under `if __name__ == "__main__":`, or the transform into a module of its own',
        )
    payload, sizes, modules = pack((dataset, transform, seed))
    setup = json.dumps({"sizes": sizes, "modules": modules}).encode() + b"\n"
    pool = WorkerPool([], payload)
    try:
        for index in range(num_workers):
            pool.workers.append(start_worker(index, payload))
            pool.workers[-1].channel.sendall(setup)
    except BaseException:
        pool.close()
        raise
    return pool


def start_worker(index: int, payload: SharedMemory) -> Worker:
    """One process."""
    ours, theirs = socket.socketpair()
    slots = [create() for _ in range(SLOTS)]
    descriptors = [theirs.fileno(), payload.descriptor, *(slot.descriptor for slot in slots)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    environment |= {IN_WORKER: "1", "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), os.getcwd()])}
    environment |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hpctrain.data.worker", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=descriptors,
        )
    return Worker(index, process, ours, ours.makefile("rb"), slots)


class Packer(pickle.Pickler):
    """Notes the modules that the receiver must have."""

    def __init__(self, file: io.BytesIO, buffers: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
        self.modules: set[str] = set()

    def reducer_override(self, thing: Any) -> Any:
        """Sees every function and class on the way."""
        module = getattr(thing, "__module__", None)
        if isinstance(module, str):
            self.modules.add(module)
        return NotImplemented


def pack(content: tuple[Any, ...]) -> tuple[SharedMemory, list[int], list[tuple[str, str]]]:
    """The content in shared memory, the sizes of its pickle and of the arrays in it, and modules to import by file."""
    file = io.BytesIO()
    buffers: list[memoryview] = []
    packer = Packer(file, buffers)
    try:
        packer.dump(content)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the dataset or the transform cannot be sent to worker processes: {error}",
            "define functions and classes at the top level of a module, or set data.workers to 0",
        ) from error
    pieces = [file.getbuffer(), *buffers]
    sizes = [piece.nbytes for piece in pieces]
    memory = create()
    view = memory.view(sum(sizes))
    for piece, end in zip(pieces, itertools.accumulate(sizes), strict=True):
        view[end - piece.nbytes : end] = piece
    return memory, sizes, list(by_file(sorted(packer.modules)))


def by_file(modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of these modules, those that a new process would not find under their names, with their files."""
    for name in modules:
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and "." not in name:
            found = PathFinder.find_spec(name)
            if found is None or found.origin != path:
                yield name, os.path.abspath(path)


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Of an array."""
    return int(np.prod(list(shape), dtype=np.int64)) * np.dtype(dtype).itemsize

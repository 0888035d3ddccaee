"""Worker processes that read and transform samples, for transforms too expensive for one thread.

They are spawned, never forked, because forking a process that uses MPI or a GPU breaks it. Each opens the dataset and
imports the transform itself; in-memory arrays and results are passed through shared memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.order import Drawn
from hpctrain.data.samples import Recipe
from hpctrain.data.worker import refer_to_dataset, refer_to_recipe
from hpctrain.errors import Code, RunFailed, UserError
from hpctrain.system import processes, python
from hpctrain.system.array_types import Ints
from hpctrain.system.shared_memory import AnonymousMemory

RESULTS = 2
"""Results in flight per worker: while the parent takes one, the worker prepares the next."""
CLOSE_S = 1.0
"""Grace period for a worker to exit before it is killed."""
LAUNCHER_VARIABLES = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "MPI_", "I_MPI_", "PALS_")
"""Prefixes of variables withheld from workers: one that imports mpi4py must not take itself for its parent's rank."""
IN_WORKER = "HPCTRAIN_DATA_WORKER"


@dataclass(eq=False)
class Worker:
    """One worker process, its socket and shared memories. Create it with ``start_worker``."""

    index: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    results: list[AnonymousMemory]

    def __post_init__(self) -> None:
        self.lines, self.turns = self.channel.makefile("rb"), itertools.cycle(self.results)
        self.asked: deque[Ints] = deque()

    def set_up(self, line: bytes) -> None:
        """Send the set-up; blocks until the worker reads if the line does not fit into the socket's buffer."""
        try:
            self.channel.sendall(line)
        except OSError as error:
            raise self._death("started") from error

    def ask(self, drawn: Drawn) -> None:
        """Request these samples, after all earlier requests."""
        self.asked.append(drawn.ids)
        request = {"epoch": drawn.epoch, "ids": drawn.ids.tolist(), "repeats": drawn.repeats.tolist()}
        with contextlib.suppress(OSError):  # the worker died; take() reports it
            self.channel.sendall(json.dumps(request).encode() + b"\n")

    def take(self) -> Samples:
        """The samples of the oldest request; raises the worker's error if it failed."""
        ids, memory = self.asked.popleft(), next(self.turns)
        try:
            line = self.lines.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._death(f"made samples {ids[:4].tolist()}{' and others' if len(ids) > 4 else ''}")
        answer = json.loads(line)
        if "what" in answer:
            kind = RunFailed if answer["passes"] else UserError
            raise kind(answer["what"], answer["fix"], Code.read(answer["code"]))
        return {name: array.copy() for name, array in memory.views(answer["arrays"]).items()}

    def _death(self, during: str) -> RunFailed:
        try:
            code = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RunFailed(
            f"data worker {self.index} (process {self.process.pid}) {how} while it {during}",
            "if memory ran out, use fewer data.workers, a smaller batch, or less data.prefetch_batches",
        )

    def close(self) -> None:
        """Close the socket and shared memories, after the process has ended."""
        self.lines.close()
        self.channel.close()
        for memory in self.results:
            memory.close()


@dataclass(eq=False)
class WorkerPool:
    """Workers that are used in turn, so that results come in order. Create it with ``start_workers``."""

    workers: list[Worker]
    payload: AnonymousMemory

    def load(self, parts: Iterable[Drawn]) -> Generator[Samples, None, None]:
        """The samples of each part, in order, requested ahead of use. ``parts`` must be infinite."""
        ahead = RESULTS * len(self.workers)
        for number, (drawn, worker) in enumerate(zip(parts, itertools.cycle(self.workers), strict=False)):
            if number >= ahead:
                yield worker.take()
            worker.ask(drawn)

    def kill(self) -> None:
        """End the processes; a thread that waits for one gets an error."""
        for worker in self.workers:
            with contextlib.suppress(OSError):  # the worker has already closed its end
                worker.channel.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + CLOSE_S
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                processes.kill(worker.process)

    def close(self) -> None:
        """End the processes and free the shared memory. Call it once, when no thread uses the pool any longer."""
        self.kill()
        for worker in self.workers:
            worker.close()
        self.payload.close()


def start_workers(num_workers: int, dataset: Dataset, recipe: Recipe) -> WorkerPool:
    """Start the processes and send each its set-up.

    Raises:
        UserError: the dataset cannot be reopened in another process, or transform or collate cannot be imported.
        RunFailed: a process died before it read its set-up.
    """
    if os.environ.get(IN_WORKER):
        raise UserError(
            "a data worker tried to start data workers: it imported the main program to find the transform",
            'put what the program does under `if __name__ == "__main__":`, or the transform into a separate module',
        )
    pool = WorkerPool([], AnonymousMemory.create())
    try:
        setup = {
            "dataset": refer_to_dataset(dataset, pool.payload),
            "recipe": refer_to_recipe(recipe),
            "path": [*filter(None, sys.path), os.getcwd()],
        }
        line = json.dumps(setup).encode() + b"\n"
        for index in range(num_workers):
            pool.workers.append(start_worker(index, pool.payload))
        for worker in pool.workers:  # after all are started, since sending may block until a worker is up
            worker.set_up(line)
    except BaseException:
        pool.close()
        raise
    return pool


def start_worker(index: int, payload: AnonymousMemory) -> Worker:
    """Start one worker process."""
    ours, theirs = socket.socketpair()
    results = [AnonymousMemory.create() for _ in range(RESULTS)]
    descriptors = [theirs.fileno(), payload.descriptor, *(memory.descriptor for memory in results)]
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
    return Worker(index, process, ours, results)

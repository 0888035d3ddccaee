"""A large file written at the pace of its disk: the page cache never runs far ahead of what is durable.

What is left at the end for the last sync is little, so that a writer can be stopped at any time, and the size of
the file shows others how far it has come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.files import created, write_at
from hpctrain.errors import HpctrainError

THREADS = 2
"""Threads of a writer: while one is in the file system, where a file has one writer at a time, the other sums up."""
BLOCK_BYTES = 1 << 20
"""Bytes that a thread sums up and writes in one go: they stay in its cache meanwhile."""
FIRST_AHEAD_BYTES = 8 << 20
LEAST_AHEAD_BYTES = 1 << 20
"""Bytes that may be written but not durable: first, and at least."""
QUICK_S = 0.5
"""A sync within this time lets writers run twice as far ahead."""
SLOW_S = 2.0
"""One beyond this, half as far."""


class Dropped(HpctrainError):
    """A file was written no further because it is no longer wanted."""


def write_paced(
    path: Path,
    data: NDArray[np.uint8],
    visit: Callable[[int, int], None] = lambda begin, end: None,
    is_dropped: Callable[[], bool] = lambda: False,
    ending: Callable[[], bytes] = bytes,
    mode: int = 0o666,
) -> None:
    """Writes a new file and returns when its bytes are on the disk. Its name is durable after ``sync_folder``.

    Args:
        path: of the file.
        data: its bytes.
        visit: called once for each block as visit(begin, end), by any thread, before the block is written.
        is_dropped: asked again and again; once it says so, the file is left unfinished.
        ending: gives what is appended, when all blocks were visited and written.
        mode: permissions, of which the process' mask is taken.

    Raises:
        OSError: it cannot be written.
        Dropped: see ``is_dropped``.
    """
    with created(path, mode) as descriptor, ThreadPoolExecutor(threads(data.size), "checkpoint-write") as workers:
        PacedWrite(descriptor, data, visit, is_dropped).run(workers, ending)


def threads(num_bytes: int) -> int:
    """Threads that write a file of this size."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0)), -(-num_bytes // BLOCK_BYTES)))


class PacedWrite:
    """One file that is being written; ``run`` is all there is to call."""

    def __init__(
        self,
        descriptor: int,
        data: NDArray[np.uint8],
        visit: Callable[[int, int], None],
        is_dropped: Callable[[], bool],
    ) -> None:
        self.descriptor = descriptor
        self.view = data.data
        self.size = data.size
        self.visit = visit
        self.is_dropped = is_dropped
        self.changed = Condition()
        self.next = 0
        """Where the next block begins."""
        self.written = 0
        """Bytes given to the file system."""
        self.durable = 0
        """Bytes that were there when the last sync began."""
        self.ahead = FIRST_AHEAD_BYTES
        self.over = False
        """No further block is to be begun."""

    def run(self, workers: ThreadPoolExecutor, ending: Callable[[], bytes]) -> None:
        """Syncs what the workers write, until all of it and the ending are durable."""
        futures = [workers.submit(self._work) for _ in range(threads(self.size))]
        try:
            while self._await_bytes():
                self._sync()
        finally:
            self._end()
            for future in futures:
                future.result()
        write_at(self.descriptor, memoryview(ending()), self.size)
        os.fsync(self.descriptor)

    def _work(self) -> None:
        """Blocks, one by one, by each of the workers."""
        try:
            while (begin := self._take()) < self.size:
                end = min(self.size, begin + BLOCK_BYTES)
                self.visit(begin, end)
                write_at(self.descriptor, self.view[begin:end], begin)
                with self.changed:
                    self.written += end - begin
                    if self.written == self.size or self.written - self.durable >= self.ahead // 2:
                        self.changed.notify_all()
        except BaseException:
            self._end()
            raise

    def _take(self) -> int:
        """Where the next block begins; the size of the file if none is left to this worker."""
        with self.changed:
            while not self.over and self.next - self.durable >= self.ahead:
                self.changed.wait()
            if not self.over and self.is_dropped():
                raise Dropped("its writer was asked to stop", "nothing is to be done")
            begin, self.next = self.next, self.next + BLOCK_BYTES
            return self.size if self.over else begin

    def _await_bytes(self) -> bool:
        """Waits until there is something to sync; False if the last sync is all that is left to do."""
        with self.changed:
            while not self.over and self.written < self.size and self.written - self.durable < self.ahead // 2:
                self.changed.wait()
            return not self.over and self.written < self.size

    def _sync(self) -> None:
        """Makes durable what is written by now, while the workers continue."""
        written, begin = self.written, time.monotonic()
        os.fdatasync(self.descriptor)
        seconds = time.monotonic() - begin
        with self.changed:
            self.durable = written
            if seconds < QUICK_S:
                self.ahead *= 2
            elif seconds > SLOW_S:
                self.ahead = max(LEAST_AHEAD_BYTES, self.ahead // 2)
            self.changed.notify_all()

    def _end(self) -> None:
        """Releases all waiters."""
        with self.changed:
            self.over = True
            self.changed.notify_all()

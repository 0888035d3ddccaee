"""Writes large files at the speed of the disk, with a limit on unsynced bytes in the page cache.

Little is left for the last sync, so a writer can be stopped at any time, and the file's size shows its progress.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition

from hpctrain.checkpoint.format.durable_files import created, write_at
from hpctrain.errors import HpctrainError
from hpctrain.system.array_types import Bytes

THREADS = 2
"""Threads per writer: one writes, since file systems allow one writer per file at a time; the other checksums."""
BLOCK_BYTES = 1 << 20
"""Bytes that a thread checksums and then writes, few enough to stay in its cache."""
FIRST_AHEAD_BYTES = 8 << 20
LEAST_AHEAD_BYTES = 1 << 20
"""Initial and minimum limit on bytes that are written but not durable."""
QUICK_S = 0.5
"""The limit is doubled after a sync faster than this."""
SLOW_S = 2.0
"""The limit is halved after a sync slower than this."""


class Dropped(HpctrainError):
    """A write was stopped because the file is no longer wanted."""


def write_paced(
    path: Path,
    data: Bytes,
    visit: Callable[[int, int], None] = lambda begin, end: None,
    is_dropped: Callable[[], bool] = lambda: False,
    ending: Callable[[], bytes] = bytes,
    mode: int = 0o666,
) -> None:
    """Write a new file; returns when its bytes are on disk. Its name is durable after ``sync``.

    Args:
        path: the file.
        data: its bytes.
        visit: visit(begin, end) is called once per block, in any thread, before the block is written.
        is_dropped: checked before each block; if it returns true, the file is left unfinished.
        ending: returns the bytes to append after all blocks were visited and written.
        mode: permissions, before the umask.

    Raises:
        OSError: the file cannot be written.
        Dropped: ``is_dropped`` returned true.
    """
    with created(path, mode) as descriptor, ThreadPoolExecutor(threads(data.size), "checkpoint-write") as workers:
        PacedWrite(descriptor, data, visit, is_dropped).run(workers, ending)


def threads(num_bytes: int) -> int:
    """Number of threads to write a file of this size."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0)), -(-num_bytes // BLOCK_BYTES)))


class PacedWrite:
    """The state of one paced write; call ``run`` once."""

    def __init__(
        self,
        descriptor: int,
        data: Bytes,
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
        """Offset of the next block."""
        self.written = 0
        """Bytes passed to the file system."""
        self.durable = 0
        """Bytes that were written when the last sync began."""
        self.ahead = FIRST_AHEAD_BYTES
        self.over = False
        """Whether to start no further blocks."""

    def run(self, workers: ThreadPoolExecutor, ending: Callable[[], bytes]) -> None:
        """Start the workers, and sync what they write until all of it and the ending are durable."""
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
        """Visit and write blocks in one worker until none are left."""
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
        """Offset of the next block for this worker, or the file's size if none is left. Raises Dropped."""
        with self.changed:
            while not self.over and self.next - self.durable >= self.ahead:
                self.changed.wait()
            if not self.over and self.is_dropped():
                raise Dropped("its writer was asked to stop", "nothing is to be done")
            begin, self.next = self.next, self.next + BLOCK_BYTES
            return self.size if self.over else begin

    def _await_bytes(self) -> bool:
        """Wait until there is enough to sync; False if only the final sync is left."""
        with self.changed:
            while not self.over and self.written < self.size and self.written - self.durable < self.ahead // 2:
                self.changed.wait()
            return not self.over and self.written < self.size

    def _sync(self) -> None:
        """Sync what is written so far, while the workers continue, and adapt the limit."""
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
        """Stop the workers and wake all waiting threads."""
        with self.changed:
            self.over = True
            self.changed.notify_all()

"""Runs an iterator ahead of its consumer, in one thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


class Failed:
    """What ended the source."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def prefetched(source: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """The items of ``source`` in order, up to ``depth`` of them ready or being made ahead of the consumer.

    The thread starts with the first item asked for. Its errors are raised where the item is taken. Closing the
    generator ends the thread after the item that it is making, then closes the source.
    """
    if depth == 0:
        yield from source
        return
    ready: queue.SimpleQueue[T | Failed] = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    stopped = threading.Event()

    def run() -> None:
        try:
            while room.acquire() and not stopped.is_set():
                ready.put(next(source))
        except BaseException as error:  # StopIteration too: it is what ends the consumer
            ready.put(Failed(error))

    thread = threading.Thread(target=run, name="hpctrain-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, Failed):
                if isinstance(item.error, StopIteration):
                    return
                raise item.error
            yield item
            room.release()
    finally:
        stopped.set()
        room.release()
        thread.join()
        source.close()

"""Writes scalars for TensorBoard to <run folder>/tensorboard."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.run.events import Event
from hpctrain.track.sink import scalars

MOST_WAITING = 1000
"""Most events queued for the disk; further ones are dropped."""
CLOSE_S = 10.0
"""Longest wait at the end of a run for unwritten events."""


class TensorBoardSink:
    """Writes through tensorboardX in a thread.

    tensorboardX has its own thread, but if that dies on a full disk, adding a scalar would block forever.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self.open: Callable[[int | None], Any] = lambda step: SummaryWriter(
            str(folder), purge_step=step, write_to_disk=True
        )
        self.waiting: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self.is_over = threading.Event()
        self.thread: threading.Thread | None = None

    def event(self, event: Event) -> None:
        """Queues an event. TensorBoard hides what earlier attempts wrote beyond this attempt's first step."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.write, daemon=True, name="tensorboard")
            self.thread.start()
        with suppress(queue.Full):
            self.waiting.put_nowait(event)

    def close(self) -> None:
        self.is_over.set()
        if self.thread is not None:
            with suppress(queue.Full):
                self.waiting.put_nowait(None)
            self.thread.join(CLOSE_S)

    def write(self) -> None:
        """Writes queued events until the sink is closed and the queue is empty."""
        writer: Any = None
        while not (self.is_over.is_set() and self.waiting.empty()):
            if event := self.waiting.get():
                with suppress(OSError):
                    writer = writer or self.open(event.step + 1 if event.step else None)
                    for name, value in scalars(event).items():
                        writer.add_scalar(name, value, event.step, walltime=event.time)
        with suppress(OSError):
            if writer is not None:
                writer.close()

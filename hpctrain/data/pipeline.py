"""Each rank's training and validation batches, prefetched ahead of the step."""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from hpctrain.data.dataset import Dataset, Samples, SeededDataset
from hpctrain.data.order import Drawn, Order, first_draw, part_of
from hpctrain.data.samples import Recipe, make_batch
from hpctrain.data.worker_pool import WorkerPool, start_workers
from hpctrain.system.array_types import Ints

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch."""

    epoch: int
    """From 0."""
    index: int
    """Index of the global batch within its epoch."""
    micro_batches: tuple[Samples, ...]
    """The part, cut into at most ``accumulate`` nonempty micro-batches; no micro-batches if the part is empty."""
    global_samples: int
    """Samples in the whole global batch."""
    sample_ids: Ints
    """int64[local_samples]: indices of the samples in the dataset, or numbers in the epoch of a stream."""
    ends_epoch: bool
    """Whether it is the last global batch of its epoch."""

    @property
    def local_samples(self) -> int:
        """Samples in this rank's part."""
        return len(self.sample_ids)


@dataclass(frozen=True)
class Part:
    """The samples from which a Batch is made."""

    drawn: Drawn
    index: int
    global_samples: int
    accumulate: int

    @property
    def pieces(self) -> list[Drawn]:
        """The samples of each micro-batch: at most ``accumulate`` pieces, none of them empty."""
        count = len(self.drawn.ids)
        return [self.drawn.part(part_of(count, piece, self.accumulate)) for piece in range(min(self.accumulate, count))]


class BatchSource(Protocol):
    """Infinite sequence of global batches, epoch after epoch, of which this rank gets its part."""

    def starting_at(self, epoch: int, batch: int) -> Iterator[Batch]:
        """Infinite iterator over batches, starting with this one; closes any earlier iterator of this object."""

    def state_dict(self) -> dict[str, Any]:
        """State needed to resume after the last batch taken, besides epoch and batch."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``; called before ``starting_at``."""

    def close(self) -> None:
        """Stop threads and processes; may be called repeatedly."""


@dataclass(eq=False)
class TrainingData:
    """Infinite sequence of global batches of a dataset, epoch after epoch, of which this rank gets its part."""

    dataset: Dataset
    order: Order
    """Over ``len(dataset)`` samples."""
    rank: int
    size: int
    """Size of the data-parallel group, in which this process has ``rank``."""
    accumulate: int = 1
    """Maximum number of micro-batches per batch."""
    prefetch: int = 2
    """Batches that a thread keeps ready. 0 reads each batch on request; so does a dataset or recipe that draws from
    global generators, unless worker processes read it."""
    workers: int = 0
    """Worker processes that read and transform; 0 uses the prefetch thread."""
    recipe: Recipe = field(default_factory=Recipe)
    """How samples become a micro-batch. Its seed is for transforms; the order has a separate one."""
    place: Callable[[Samples], Samples] = lambda samples: samples
    """Moves a micro-batch to memory with fast transfer to the device, such as pinned memory."""
    batches: Generator[Batch, None, None] | None = field(default=None, init=False)
    pool: WorkerPool | None = field(default=None, init=False)

    def starting_at(self, epoch: int, batch: int) -> Iterator[Batch]:
        """Infinite iterator over batches, starting with this one; closes any earlier iterator of this object."""
        self.close()
        if self.workers:
            self.pool = start_workers(self.workers, self.dataset, self.recipe)
        depth = self.prefetch if self.workers else thread_depth(self.dataset, self.recipe, self.prefetch)
        self.batches = prefetched(self._load(self._parts(epoch, batch)), depth)
        return self.batches

    def state_dict(self) -> dict[str, Any]:
        """Empty: the order can start at any batch."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Nothing to restore; see ``state_dict``."""

    def close(self) -> None:
        """Stop the thread and the worker processes; may be called repeatedly."""
        if self.pool:
            self.pool.kill()  # first, because the thread may be waiting for a worker
        if self.batches:
            self.batches.close()
        if self.pool:
            self.pool.close()
        self.pool = self.batches = None

    def _parts(self, epoch: int, batch: int) -> Iterator[Part]:
        while True:
            for index in range(batch, self.order.batches_per_epoch):
                everything = self.order.batch(epoch, index)
                count = len(everything.ids)
                own = everything.part(part_of(count, self.rank, self.size))
                yield Part(own, index, count, self.accumulate)
            epoch, batch = epoch + 1, 0

    def _load(self, parts: Iterator[Part]) -> Generator[Batch, None, None]:
        parts, ahead = itertools.tee(parts)
        pieces = (piece for part in ahead for piece in part.pieces)
        here = (make_batch(self.dataset, self.recipe, drawn) for drawn in pieces)
        loaded = self.pool.load(pieces) if self.pool else here
        for part in parts:
            yield self._batch(part, tuple(self.place(next(loaded)) for _ in part.pieces))

    def _batch(self, part: Part, micro_batches: tuple[Samples, ...]) -> Batch:
        return Batch(
            epoch=part.drawn.epoch,
            index=part.index,
            micro_batches=micro_batches,
            global_samples=part.global_samples,
            sample_ids=part.drawn.ids,
            ends_epoch=part.index == self.order.batches_per_epoch - 1,
        )


@dataclass(eq=False)
class ValidationData:
    """This rank's contiguous part of a dataset, in storage order, in batches of up to ``batch`` samples.

    The ranks' parts cover the dataset, each sample once. Ranks may have different numbers of batches, or none.
    """

    dataset: Dataset
    batch: int
    rank: int
    size: int
    prefetch: int = 2
    recipe: Recipe = field(default_factory=Recipe)
    place: Callable[[Samples], Samples] = lambda samples: samples

    @property
    def part(self) -> slice:
        """This rank's samples."""
        return part_of(len(self.dataset), self.rank, self.size)

    def __len__(self) -> int:
        """Number of batches on this rank."""
        part = self.part
        return len(range(part.start, part.stop, self.batch))

    def __iter__(self) -> Iterator[Samples]:
        return prefetched(self._batches(), thread_depth(self.dataset, self.recipe, self.prefetch))

    def _batches(self) -> Generator[Samples, None, None]:
        part = self.part
        for begin in range(part.start, part.stop, self.batch):
            ids = np.arange(begin, min(begin + self.batch, part.stop), dtype=np.int64)
            yield self.place(make_batch(self.dataset, self.recipe, first_draw(ids)))


def thread_depth(dataset: Dataset, recipe: Recipe, prefetch: int) -> int:
    """How many batches a thread may prefetch: 0 if it would draw from global generators, which the model uses too."""
    return 0 if recipe.draws or isinstance(dataset, SeededDataset) else prefetch


@dataclass(frozen=True)
class Failed:
    """The exception with which the source ended."""

    error: BaseException


def prefetched(source: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Yield the items of ``source`` in order; a thread prepares up to ``depth`` of them ahead of the consumer.

    The thread starts when the first item is requested, and its errors are raised in the consumer. Closing the generator
    waits until the thread has finished its current item, then closes the source; so does the exit of the interpreter.
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
        except BaseException as error:  # including StopIteration, which ends the consumer
            ready.put(Failed(error))

    def stop() -> None:
        stopped.set()
        room.release()
        thread.join()
        source.close()

    thread = threading.Thread(target=run, name="hpctrain-prefetch", daemon=True)
    thread.start()
    atexit.register(stop)  # later, the interpreter ends daemon threads in the middle of the source
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
        atexit.unregister(stop)
        stop()

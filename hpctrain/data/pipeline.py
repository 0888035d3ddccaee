"""What each rank trains and validates on, batch after batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Samples, read
from hpctrain.data.order import Order, part_of
from hpctrain.data.prefetch import prefetched
from hpctrain.data.transform import Transform, load
from hpctrain.data.workers import WorkerPool, start


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch."""

    epoch: int
    """From 0."""
    index: int
    """Of the global batch within its epoch."""
    micro_batches: tuple[Samples, ...]
    """The part, cut into at most ``accumulate`` pieces, none of them empty; no pieces where the part is empty."""
    local_samples: int
    """Samples in this rank's part."""
    global_samples: int
    """Samples in all ranks' parts together."""
    sample_ids: NDArray[np.int64]
    """int64[local_samples]: which samples of the dataset these are."""
    ends_epoch: bool
    """Whether it is the last global batch of its epoch."""


@dataclass(frozen=True)
class Part:
    """What a Batch is made from."""

    epoch: int
    index: int
    ids: NDArray[np.int64]
    global_samples: int


class TrainingData:
    """Endless global batches, epoch after epoch, of which this rank gets its part."""

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        rank: int,
        size: int,
        accumulate: int = 1,
        prefetch: int = 2,
        workers: int = 0,
        transform: Transform | None = None,
        seed: int = 0,
        place: Callable[[Samples], Samples] = lambda samples: samples,
    ) -> None:
        """
        Args:
            dataset: where samples come from.
            order: over ``len(dataset)`` samples.
            rank, size: of this process in the data-parallel group.
            accumulate: micro-batches that a batch is cut into.
            prefetch: batches held ready by a thread; 0 reads when a batch is asked for.
            workers: worker processes that read and transform; 0 leaves that to the thread.
            transform: of one sample, with random numbers keyed by (seed, epoch, sample).
            seed: for the transform; the order has its own.
            place: moves a batch to memory from which it reaches the device fastest.
        """
        self.dataset = dataset
        self.order = order
        self.rank = rank
        self.size = size
        self.accumulate = accumulate
        self.prefetch = prefetch
        self.workers = workers
        self.transform = transform
        self.seed = seed
        self.place = place
        self.batches: Generator[Batch, None, None] | None = None
        self.pool: WorkerPool | None = None

    def starting_at(self, epoch: int, batch: int) -> Iterator[Batch]:
        """Batches from this one on, without end; an earlier iterator of this object is closed."""
        self.close()
        if self.workers:
            self.pool = start(self.workers, self.dataset, self.transform, self.seed)
        self.batches = prefetched(self._load(self._parts(epoch, batch)), self.prefetch)
        return self.batches

    def close(self) -> None:
        """Ends the thread and the worker processes; may be called again."""
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
                everything = self.order.batch_indices(epoch, index)
                yield Part(epoch, index, everything[part_of(len(everything), self.rank, self.size)], len(everything))
            epoch, batch = epoch + 1, 0

    def _load(self, parts: Iterator[Part]) -> Generator[Batch, None, None]:
        if self.pool:
            parts, ahead = itertools.tee(parts)
            loaded = self.pool.load((part.epoch, part.ids) for part in ahead)
            yield from map(self._batch, parts, loaded)
        for part in parts:
            yield self._batch(part, load(self.dataset, self.transform, self.seed, part.epoch, part.ids))

    def _batch(self, part: Part, samples: Samples) -> Batch:
        count = len(part.ids)
        samples = self.place(samples)
        pieces = [part_of(count, piece, self.accumulate) for piece in range(min(self.accumulate, count))]
        return Batch(
            epoch=part.epoch,
            index=part.index,
            micro_batches=tuple({name: array[piece] for name, array in samples.items()} for piece in pieces),
            local_samples=count,
            global_samples=part.global_samples,
            sample_ids=part.ids,
            ends_epoch=part.index == self.order.batches_per_epoch - 1,
        )


class ValidationData:
    """This rank's contiguous part of a dataset, as stored, in batches of up to ``batch`` samples.

    The parts of all ranks together are the dataset, each sample once. Ranks may have different numbers of batches, or
    none.
    """

    def __init__(self, dataset: Dataset, batch: int, rank: int, size: int, prefetch: int = 2) -> None:
        self.dataset = dataset
        self.batch = batch
        self.part = part_of(len(dataset), rank, size)
        self.prefetch = prefetch

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(range(self.part.start, self.part.stop, self.batch))

    def __iter__(self) -> Iterator[Samples]:
        return prefetched(self._batches(), self.prefetch)

    def _batches(self) -> Generator[Samples, None, None]:
        for begin in range(self.part.start, self.part.stop, self.batch):
            yield read(self.dataset, np.arange(begin, min(begin + self.batch, self.part.stop), dtype=np.int64))

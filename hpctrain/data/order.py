"""The order of samples: which ones form each global batch, independent of the number of ranks.

Random numbers are keyed by their purpose, so they depend neither on the rank that draws them nor on the time.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from hpctrain.data.dataset import users_code
from hpctrain.errors import UserError
from hpctrain.system.array_types import Ints

ROUNDS = 8
"""Four rounds are pseudorandom for few observed pairs (Luby and Rackoff 1988); the rest is a safety margin."""
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class FeistelPermutation:
    """A random-access permutation of 0 to ``length - 1``, keyed by ``ROUNDS`` random words.

    A generalized Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a position
    is a pair (row, column) in a rectangle of at least ``length`` cells, and each round adds a hash of one to the other,
    modulo its size. Results of ``length`` or more are permuted again until they fall below it (cycle walking).
    """

    length: int
    keys: NDArray[np.uint64]

    @classmethod
    def draw(cls, length: int, rng: Generator) -> FeistelPermutation:
        """Draw a random permutation of ``length`` items."""
        return cls(length, rng.integers(0, 2**64, ROUNDS, dtype=np.uint64))

    def __call__(self, begin: int, end: int) -> Ints:
        """int64[end - begin]: the items at positions ``begin`` to ``end - 1``."""
        found = self._once(np.arange(begin, end, dtype=np.uint64))
        while len(outside := np.flatnonzero(found >= self.length)):
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        columns = np.uint64(math.isqrt(self.length - 1) + 1)
        rows = np.uint64(-(-self.length // int(columns)))
        row, column = np.divmod(positions, columns)
        for even, odd in self.keys.reshape(-1, 2):
            row = (row + _hashed(column ^ even) % rows) % rows
            column = (column + _hashed(row ^ odd) % columns) % columns
        return row * columns + column


def _hashed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit depends on all bits."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))


LARGE_SAMPLES = 2**24
"""From this number of samples on, a full shuffle is computed on the fly, without memory or work at the start of an
epoch."""
GROUP_BLOCKS = 16
"""Number of blocks whose samples are shuffled together if ``shuffle`` is ``block``."""

Shuffle = Literal["full", "block", "none"]


class RandomStream(enum.IntEnum):
    """Purposes of random numbers, each with an independent stream for the same seed and epoch."""

    ORDER = 0
    """The order of samples, or of blocks, in an epoch."""
    WITHIN_GROUP = 1
    """The order of samples within one group of blocks."""
    TRANSFORM = 2
    """The random transform of one sample."""
    SAMPLER = 3
    """The samples of an epoch, if the task has a sampler."""
    DATASET = 4
    """Random numbers that a dataset draws while it reads a sample."""
    RECIPE = 5
    """Random numbers that transform and collate draw from global generators for a micro-batch."""


def keyed_generator(seed: int, epoch: int, stream: RandomStream, index: int = 0, repeat: int = 0) -> Generator:
    """A generator keyed by (seed, epoch, stream, index, repeat).

    Philox is counter-based (Salmon et al., SC 2011): seed and epoch form its 128-bit key; stream, index and repeat form
    the upper three words of its 256-bit counter, so no two generators overlap within the first 2**64 counter values.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    counter = np.array([0, repeat, index, stream], dtype=np.uint64)
    return Generator(Philox(key=key, counter=counter))


@dataclass(frozen=True)
class Epoch:
    """The argument of a sampler: the epoch for which it returns samples."""

    index: int
    """From 0."""
    rng: Generator
    """Keyed by the run's seed and the epoch: the same on every rank and after a resume. Use no other generator."""
    num_samples: int
    """Samples in the dataset."""
    global_batch: int
    """Samples in a global batch; consecutive slices of the sampler's result become the batches."""


Sampler = Callable[[Epoch], Ints]
"""sampler(epoch) returns int64[n]: the samples of an epoch in order. n is constant, and repeats are allowed."""


@dataclass(frozen=True)
class Drawn:
    """Samples of one epoch, with the number of earlier draws of each, so that repeats get separate random numbers."""

    epoch: int
    ids: Ints
    repeats: Ints

    def part(self, which: slice) -> Drawn:
        """The samples in this slice."""
        return Drawn(self.epoch, self.ids[which], self.repeats[which])


EpochOrder = Callable[[int, int], Drawn]
"""order(begin, end) returns the samples at positions ``begin`` to ``end - 1`` of an epoch."""


def first_draw(ids: Ints, epoch: int = 0) -> Drawn:
    """Samples that were not drawn before in the epoch."""
    return Drawn(epoch, ids, np.zeros(len(ids), np.int64))


def part_of(n: int, rank: int, size: int) -> slice:
    """The contiguous slice of ``n`` items that belongs to this rank; the first ``n % size`` ranks get one more."""
    share, rest = divmod(n, size)
    begin = rank * share + min(rank, rest)
    return slice(begin, begin + share + (rank < rest))


@dataclass(frozen=True)
class Order:
    """The order of ``length`` samples in every epoch, cut into global batches.

    A pure function of the fields: any batch of any epoch is computed directly, without the ones before it.
    """

    length: int
    """Samples in the dataset."""
    global_batch: int
    """Samples in a global batch; the last one of an epoch may be smaller."""
    seed: int = 0
    """0 to 2**64 - 1."""
    shuffle: Shuffle = "full"
    """full: a permutation of all samples (4 bytes of memory per sample below LARGE_SAMPLES, none from there on); block:
    blocks of samples are permuted, then the samples within each group of ``GROUP_BLOCKS`` blocks; none: storage order
    in every epoch."""
    block_samples: int = 1024
    """Samples in a block."""
    drop_last: bool = False
    """Drop the last global batch of an epoch if it is smaller."""
    sampler: Sampler | None = None
    """Returns the samples of each epoch and replaces ``shuffle``."""
    _epochs: dict[int, EpochOrder] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("length", "global_batch", "block_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"the data order's {name} is {getattr(self, name)}", "give at least 1")
        if self.shuffle not in ("full", "block", "none"):
            raise UserError(f"data.shuffle is {self.shuffle!r}", "give full, block or none")
        if self.drop_last and self.epoch_samples < self.global_batch:
            size = self.global_batch
            what = f"an epoch of {self.epoch_samples} samples fills no global batch of {size}, and drop_last is on"
            raise UserError(what, "use a smaller global batch, or set data.drop_last to false")

    @cached_property
    def epoch_samples(self) -> int:
        """Samples in an epoch, including those of a dropped last batch."""
        return self.length if self.sampler is None else len(draw(self.sampler, self, 0))

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of one epoch."""
        samples = self.epoch_samples
        return samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)

    def fingerprint(self) -> str:
        """sha256 of the sampler's indices in the first epoch; empty without a sampler."""
        if self.sampler is None:
            return ""
        return hashlib.sha256(draw(self.sampler, self, 0).tobytes()).hexdigest()

    def batch_indices(self, epoch: int, batch: int) -> Ints:
        """The samples of one global batch, in order; see ``batch``."""
        return self.batch(epoch, batch).ids

    def batch(self, epoch: int, batch: int) -> Drawn:
        """The samples of one global batch, in order.

        Args:
            epoch: from 0.
            batch: index within the epoch, 0 to ``batches_per_epoch - 1``.

        Returns:
            ``global_batch`` samples, or fewer in the last batch.
        """
        if not 0 <= batch < self.batches_per_epoch:
            raise IndexError(f"batch {batch} of an epoch of {self.batches_per_epoch}")
        begin = batch * self.global_batch
        end = min(begin + self.global_batch, self.epoch_samples)
        return self._epoch(epoch)(begin, end)

    def _epoch(self, epoch: int) -> EpochOrder:
        order = self._epochs.get(epoch)
        if order is None:
            try:
                order = order_of(self, epoch)
            except MemoryError as error:
                raise UserError(
                    f"the order of {self.length} samples does not fit into memory with data.shuffle {self.shuffle}",
                    "set larger data.block_samples, or data.shuffle to full, which takes no memory for large data sets",
                ) from error
            self._epochs.clear()  # batches are read epoch by epoch, so one permutation in memory is enough
            self._epochs[epoch] = order
        return order


class BlockShuffle:
    """Permuted blocks, with the samples permuted within each group of ``GROUP_BLOCKS`` blocks."""

    def __init__(self, order: Order, epoch: int, blocks: Ints) -> None:
        self.order = order
        self.epoch = epoch
        self.blocks = blocks
        ends = np.cumsum(np.minimum(order.block_samples, order.length - blocks * order.block_samples))
        firsts = np.arange(0, len(blocks), GROUP_BLOCKS)
        self.begins = np.concatenate([[0], ends])[firsts]
        """Position of each group's first sample."""
        self.cached: tuple[int, Ints] = (-1, np.empty(0, dtype=np.int64))

    def __call__(self, begin: int, end: int) -> Ints:
        first, last = np.searchsorted(self.begins, [begin, end - 1], side="right") - 1
        parts = [
            self._group(group)[max(0, begin - self.begins[group]) : end - self.begins[group]]
            for group in range(first, last + 1)
        ]
        return np.concatenate(parts)

    def _group(self, group: int) -> Ints:
        cached, samples = self.cached
        if cached != group:
            size = self.order.block_samples
            blocks = self.blocks[group * GROUP_BLOCKS : (group + 1) * GROUP_BLOCKS]
            samples = (blocks[:, None] * size + np.arange(size)).ravel()
            samples = samples[samples < self.order.length]
            keyed_generator(self.order.seed, self.epoch, RandomStream.WITHIN_GROUP, group).shuffle(samples)
            self.cached = (group, samples)
        return samples


def order_of(order: Order, epoch: int) -> EpochOrder:
    """Draw the order of an epoch, from the sampler or by shuffling."""
    if order.sampler is not None:
        ids = draw(order.sampler, order, epoch)
        if len(ids) != order.epoch_samples:
            what = f"the sampler gives {len(ids)} samples for epoch {epoch} and {order.epoch_samples} for epoch 0"
            raise UserError(what, "give the same number for every epoch: draw some samples again, or fewer of them")
        drawn = Drawn(epoch, ids, repeats_in(ids))
        return lambda begin, end: drawn.part(slice(begin, end))
    shuffled = shuffle_of(order, epoch)
    return lambda begin, end: first_draw(shuffled(begin, end), epoch)


def repeats_in(ids: Ints) -> Ints:
    """For each position, how often its value occurs before it."""
    by_id = np.argsort(ids, kind="stable")
    begins = np.searchsorted(ids[by_id], ids[by_id])
    before = np.empty_like(ids)
    before[by_id] = np.arange(len(ids)) - begins
    return before


def shuffle_of(order: Order, epoch: int) -> Callable[[int, int], Ints]:
    """A function that returns the samples at positions ``begin`` to ``end - 1`` of the shuffled epoch."""
    if order.shuffle == "none":
        return lambda begin, end: np.arange(begin, end, dtype=np.int64)
    if order.shuffle == "block":
        blocks = np.arange(-(-order.length // order.block_samples), dtype=np.int64)
        keyed_generator(order.seed, epoch, RandomStream.ORDER).shuffle(blocks)
        return BlockShuffle(order, epoch, blocks)
    rng = keyed_generator(order.seed, epoch, RandomStream.ORDER)
    if order.length >= LARGE_SAMPLES:
        return FeistelPermutation.draw(order.length, rng)
    permutation = np.arange(order.length, dtype=np.int32)
    rng.shuffle(permutation)
    return lambda begin, end: permutation[begin:end].astype(np.int64)


def draw(sampler: Sampler, order: Order, epoch: int) -> Ints:
    """Call the sampler for an epoch; raises UserError if its result is not an array of valid sample indices."""
    rng = keyed_generator(order.seed, epoch, RandomStream.SAMPLER)
    with users_code(f"the sampler failed in epoch {epoch}", "correct the sampler"):
        ids = np.asarray(sampler(Epoch(epoch, rng, order.length, order.global_batch)))
    fix = f"return an array of whole numbers from 0 to {order.length - 1}"
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise UserError(f"the sampler gives {ids.dtype}{list(ids.shape)} for epoch {epoch}", fix)
    if ids.min() < 0 or ids.max() >= order.length:
        wrong = ids[(ids < 0) | (ids >= order.length)][0]
        raise UserError(f"the sampler names sample {wrong} in epoch {epoch}, of {order.length}", fix)
    return ids.astype(np.int64)

"""Ready samplers: which samples an epoch has, as functions of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order import Epoch
from hpctrain.errors import UserError

Numbers = Sequence[float] | NDArray[Any]


@dataclass(frozen=True)
class WeightedSampler:
    """Draws samples with probabilities in proportion to their weights."""

    weights: Numbers
    """Of each sample, at least 0."""
    num_samples: int | None = None
    """Samples of an epoch; by default the length of the dataset."""
    replacement: bool = True
    """Whether a sample may be drawn several times in an epoch. Each draw has separate random transforms."""

    def __call__(self, epoch: Epoch) -> NDArray[np.int64]:
        """int64[num_samples]: the samples of an epoch.

        Raises:
            UserError: there is not one finite weight of at least 0 for each sample, or too few to draw from.
        """
        weights = one_each("weights", self.weights, epoch).astype(np.float64)
        number = epoch.num_samples if self.num_samples is None else self.num_samples
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise UserError("WeightedSampler: weights must be finite, at least 0, and not all 0", "correct the weights")
        if not self.replacement and number > np.count_nonzero(weights):
            raise UserError(
                f"WeightedSampler: {np.count_nonzero(weights)} samples have a weight, and {number} are to be drawn",
                "draw fewer with num_samples, or with replacement",
            )
        drawn = epoch.rng.choice(epoch.num_samples, number, self.replacement, weights / weights.sum())
        return drawn.astype(np.int64)


@dataclass(frozen=True)
class LengthGroupedSampler:
    """Every sample once an epoch, in random batches of similar lengths: less padding.

    The samples are shuffled, sorted by length within pools of many batches, and cut into global batches; these, and the
    samples within each, are shuffled again, so that no rank gets all long ones.
    """

    lengths: Numbers
    """Of each sample."""
    pool_batches: int = 50
    """Global batches of one pool: more make lengths more similar, fewer the order more random."""

    def __call__(self, epoch: Epoch) -> NDArray[np.int64]:
        """int64[samples of the dataset]: the samples of an epoch; raises UserError without a length for each."""
        lengths = one_each("lengths", self.lengths, epoch)
        shuffled = epoch.rng.permutation(epoch.num_samples)
        whole = epoch.num_samples // epoch.global_batch * epoch.global_batch
        pool = max(1, self.pool_batches) * epoch.global_batch
        pools = (shuffled[begin : min(begin + pool, whole)] for begin in range(0, whole, pool))
        ordered = [part[np.argsort(lengths[part], kind="stable")] for part in pools]
        batches = np.concatenate([np.empty(0, np.int64), *ordered]).reshape(-1, epoch.global_batch)
        batches = epoch.rng.permuted(epoch.rng.permutation(batches), axis=1)
        return np.concatenate([batches.ravel(), shuffled[whole:]])


@dataclass(frozen=True)
class CurriculumSampler:
    """Easy samples first: each epoch draws from the easiest share of the dataset, which grows to the whole.

    An epoch has as many samples as the dataset: while the share is smaller, its samples come several times, equally
    often except one. The share grows linearly (Platanios et al. 2019, section 2.2).
    """

    difficulty: Numbers
    """Of each sample: larger is harder."""
    begin: float = 0.2
    """Share of the samples that the first epoch draws from, above 0 and at most 1."""
    epochs: int = 10
    """Epochs until all samples take part."""

    def __call__(self, epoch: Epoch) -> NDArray[np.int64]:
        """int64[samples of the dataset]: the samples of an epoch; raises UserError without a difficulty for each."""
        difficulty = one_each("difficulty", self.difficulty, epoch)
        if not 0 < self.begin <= 1 or self.epochs < 1:
            raise UserError(
                f"CurriculumSampler: begin is {self.begin} and epochs is {self.epochs}",
                "give a share above 0 and at most 1, and at least one epoch",
            )
        share = self.begin + (1 - self.begin) * min(1.0, epoch.index / self.epochs)
        easiest = np.argsort(difficulty, kind="stable")[: max(1, round(share * epoch.num_samples))]
        rounds = -(-epoch.num_samples // len(easiest))
        return np.concatenate([epoch.rng.permutation(easiest) for _ in range(rounds)])[: epoch.num_samples]


@dataclass(frozen=True)
class LaneSampler:
    """Samples that continue each other, such as stretches of a text, for state carried from batch to batch.

    The dataset, in its order, is cut into as many lanes as a global batch has samples, and each batch holds the next
    sample of every lane: sample i of a batch continues sample i of the batch before. Every lane stays with its rank.
    Samples that fill no whole batch are left out. The order is that of all epochs.
    """

    def __call__(self, epoch: Epoch) -> NDArray[np.int64]:
        """int64[lanes * samples of a lane]: the samples of an epoch; raises UserError if a lane has none."""
        lanes, length = epoch.global_batch, epoch.num_samples // epoch.global_batch
        if not length:
            raise UserError(
                f"LaneSampler: {epoch.num_samples} samples are fewer than the {lanes} lanes of a global batch",
                "use a smaller global batch, or cut the data into shorter samples",
            )
        return np.arange(lanes * length).reshape(lanes, length).T.ravel()


def one_each(name: str, values: Numbers, epoch: Epoch) -> NDArray[Any]:
    """The numbers as an array; raises UserError if there is not one for each sample."""
    array = np.asarray(values)
    if array.shape != (epoch.num_samples,):
        raise UserError(
            f"the sampler's {name} have shape {list(array.shape)}, and the data has {epoch.num_samples} samples",
            f"give {name} with one number for each sample",
        )
    return array

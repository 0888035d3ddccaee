"""Ready-made samplers, which choose the samples of an epoch as a function of seed and epoch only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.data.order import Epoch
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array, Ints

Numbers = Sequence[float] | Array


@dataclass(frozen=True)
class WeightedSampler:
    """Draws samples with probabilities proportional to their weights."""

    weights: Numbers
    """One weight per sample, at least 0."""
    num_samples: int | None = None
    """Samples per epoch; by default the length of the dataset."""
    replacement: bool = True
    """Whether a sample may be drawn more than once in an epoch. Each draw gets separate random transforms."""

    def __call__(self, epoch: Epoch) -> Ints:
        """int64[num_samples]: the samples of an epoch.

        Raises:
            UserError: the weights are not one finite number of at least 0 per sample, or too few are above 0.
        """
        weights = one_each("weights", self.weights, epoch).astype(np.float64)
        number = epoch.num_samples if self.num_samples is None else self.num_samples
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise UserError("WeightedSampler: weights must be finite, at least 0, and not all 0", "correct the weights")
        if not self.replacement and number > np.count_nonzero(weights):
            what = f"WeightedSampler: {np.count_nonzero(weights)} samples have a weight, but {number} are requested"
            raise UserError(what, "draw fewer with num_samples, or with replacement")
        drawn = epoch.rng.choice(epoch.num_samples, number, self.replacement, weights / weights.sum())
        return drawn.astype(np.int64)


@dataclass(frozen=True)
class LengthGroupedSampler:
    """Groups samples of similar length into batches, which reduces padding; every sample comes once per epoch.

    The samples are shuffled, sorted by length within pools of many batches, and cut into global batches. The batches,
    and the samples within each, are then shuffled, so that no rank gets all the long samples.
    """

    lengths: Numbers
    """One length per sample."""
    pool_batches: int = 50
    """Global batches per pool: more make lengths within a batch more similar, fewer make the order more random."""

    def __call__(self, epoch: Epoch) -> Ints:
        """int64[num_samples]: the samples of an epoch; raises UserError if there is not one length per sample."""
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
class LaneSampler:
    """Orders consecutive samples, such as pieces of a text, for models that carry state from batch to batch.

    The dataset, in storage order, is cut into one lane per sample of a global batch, and each batch holds the next
    sample of every lane: sample i of a batch continues sample i of the previous batch. A lane stays on one rank.
    Samples that do not fill a whole batch are dropped. The order is the same in every epoch.
    """

    def __call__(self, epoch: Epoch) -> Ints:
        """int64[lanes * samples per lane]: the samples of an epoch; raises UserError if a lane would be empty."""
        lanes = epoch.global_batch
        length = epoch.num_samples // epoch.global_batch
        if not length:
            what = f"LaneSampler: {epoch.num_samples} samples are fewer than the {lanes} lanes of a global batch"
            raise UserError(what, "use a smaller global batch, or cut the data into shorter samples")
        return np.arange(lanes * length).reshape(lanes, length).T.ravel()


def one_each(name: str, values: Numbers, epoch: Epoch) -> Array:
    """The numbers as an array; raises UserError if there is not one per sample."""
    array = np.asarray(values)
    if array.shape != (epoch.num_samples,):
        what = f"the sampler's {name} have shape {list(array.shape)}, and the data has {epoch.num_samples} samples"
        raise UserError(what, f"give {name} with one number for each sample")
    return array

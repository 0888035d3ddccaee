"""Samplers: which samples an epoch has, as functions of seed and epoch."""

from itertools import islice, pairwise

import numpy as np
import pytest

from hpctrain import Epoch, LaneSampler, LengthGroupedSampler, WeightedSampler
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order, part_of
from hpctrain.data.pipeline import TrainingData
from hpctrain.data.samples import Recipe
from hpctrain.errors import UserError

LENGTH = 200
LENGTHS = np.random.default_rng(0).integers(1, 100, LENGTH)


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    return np.concatenate([order.batch_indices(epoch, batch) for batch in range(order.batches_per_epoch)])


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedSampler(LENGTHS, num_samples=90),
        WeightedSampler(LENGTHS, num_samples=90, replacement=False),
        LengthGroupedSampler(LENGTHS, pool_batches=4),
    ],
)
def test_an_epoch_depends_on_seed_and_epoch_only(sampler):
    order = Order(LENGTH, 16, seed=3, sampler=sampler)
    first = epoch_of(order, 2)
    epoch_of(order, 5)
    assert np.array_equal(epoch_of(order, 2), first)
    assert np.array_equal(Order(LENGTH, 16, seed=3, sampler=sampler).batch_indices(2, 3), first[48:64])
    assert not np.array_equal(epoch_of(order, 3), first)
    assert not np.array_equal(epoch_of(Order(LENGTH, 16, seed=4, sampler=sampler), 2), first)
    assert len(first) == order.epoch_samples and first.dtype == np.int64


def test_weights_are_probabilities():
    weights = np.zeros(LENGTH)
    weights[:4] = [1, 1, 2, 4]
    drawn = epoch_of(Order(LENGTH, 64, sampler=WeightedSampler(weights, num_samples=8000)), 0)
    assert np.allclose(np.bincount(drawn) / 1000, [1, 1, 2, 4], rtol=0.15)
    once = epoch_of(Order(LENGTH, 64, sampler=WeightedSampler(weights, 4, replacement=False)), 0)
    assert sorted(once) == [0, 1, 2, 3]


def test_batches_of_similar_lengths_hold_every_sample_once():
    order = Order(LENGTH, 16, sampler=LengthGroupedSampler(LENGTHS, pool_batches=12))
    assert sorted(epoch_of(order, 0)) == list(range(LENGTH))
    batches = [LENGTHS[order.batch_indices(0, batch)] for batch in range(12)]
    random = [LENGTHS[Order(LENGTH, 16).batch_indices(0, batch)] for batch in range(12)]
    assert sum(np.ptp(batch) for batch in batches) < 0.2 * sum(np.ptp(batch) for batch in random)
    middles = [np.median(batch) for batch in batches]
    assert middles != sorted(middles), "batches are in random order"
    assert any(list(batch) != sorted(batch) for batch in batches), "samples within a batch, too"
    assert sorted(epoch_of(Order(LENGTH, 300, sampler=LengthGroupedSampler(LENGTHS)), 0)) == list(range(LENGTH))


def test_a_sample_that_is_drawn_again_is_transformed_in_another_way():
    def noise(sample, rng):
        return {**sample, "x": rng.normal()}

    seen: dict[int, list[float]] = {}
    dataset = open_dataset({"id": np.arange(3)})
    for size in (1, 2, 3):
        order = Order(3, 4, sampler=lambda epoch: np.array([2, 0, 2, 2, 0, 1, 2]))
        ranks = []
        for rank in range(size):
            data = TrainingData(dataset, order, rank, size, prefetch=0, recipe=Recipe(noise))
            ranks.append(list(islice(data.starting_at(0, 0), 2)))
            data.close()
        values = [
            (int(i), float(x))
            for step in zip(*ranks, strict=True)
            for batch in step
            for piece in batch.micro_batches
            for i, x in zip(piece["id"], piece["x"], strict=True)
        ]
        assert [i for i, _ in values] == [2, 0, 2, 2, 0, 1, 2]
        assert len({x for _, x in values}) == 7
        assert seen.setdefault(0, [x for _, x in values]) == [x for _, x in values]


def growing(epoch: Epoch) -> np.ndarray:
    return np.arange(epoch.index + 1)


def failing(epoch: Epoch) -> np.ndarray:
    raise ValueError("no such epoch")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_sample_of_a_rank_continues_that_of_the_batch_before(ranks):
    order = Order(LENGTH, 16, sampler=LaneSampler())
    assert order.epoch_samples == LENGTH // 16 * 16
    for rank in range(ranks):
        mine = part_of(16, rank, ranks)
        batches = [order.batch_indices(epoch, batch)[mine] for epoch in (0, 1) for batch in range(12)]
        assert all(np.array_equal(later, earlier + 1) for earlier, later in pairwise(batches[:12]))
        assert np.array_equal(batches[12], batches[0]), "an epoch begins again"


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (growing, "gives 2 samples for epoch 1 and 1 for epoch 0"),
        (failing, r"the sampler failed in epoch 0: ValueError: no such epoch \(test_samplers.py"),
        (lambda epoch: np.array([0, LENGTH]), "names sample 200 in epoch 0, of 200"),
        (lambda epoch: np.array([1, -2]), "names sample -2 in epoch 0, of 200"),
        (lambda epoch: np.array([0.5]), r"gives float64\[1\] for epoch 0"),
        (lambda epoch: np.array([], int), r"gives int64\[0\] for epoch 0"),
        (WeightedSampler([1, 2]), r"weights have shape \[2\], and the data has 200"),
        (WeightedSampler([-1.0] * LENGTH), "must be finite, at least 0"),
        (WeightedSampler([1.0] * LENGTH, 300, replacement=False), "200 samples have a weight, but 300 are requested"),
        (lambda epoch: LaneSampler()(Epoch(0, epoch.rng, 15, 16)), "15 samples are fewer than the 16 lanes"),
    ],
)
def test_a_wrong_sampler_is_told(sampler, message):
    with pytest.raises(UserError, match=message) as caught:
        Order(LENGTH, 16, sampler=sampler).batch_indices(1, 0)
    if "names sample" in message:
        assert caught.value.fix == "return an array of whole numbers from 0 to 199"


def test_the_fingerprint_tells_samplers_apart():
    def fingerprint(*weights):
        return Order(2, 1, sampler=WeightedSampler(weights, 50) if weights else None).fingerprint()

    assert fingerprint() == ""
    assert fingerprint(1, 2) == fingerprint(1, 2) != fingerprint(1, 3)

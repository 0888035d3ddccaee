"""The order of samples: a partition in every epoch, and the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.order import GROUP_BLOCKS, Order, RandomStream, keyed_generator, part_of
from hpctrain.errors import UserError

SHUFFLES = ("full", "block", "none")
orders = st.builds(
    Order,
    length=st.integers(1, 400),
    global_batch=st.integers(1, 64),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.sampled_from(SHUFFLES),
    block_samples=st.integers(1, 32),
)


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    return np.concatenate([order.batch_indices(epoch, batch) for batch in range(order.batches_per_epoch)])


@given(n=st.integers(0, 1000), size=st.integers(1, 40))
def test_parts_are_a_partition_in_rank_order(n, size):
    parts = [range(n)[part_of(n, rank, size)] for rank in range(size)]
    assert [sample for part in parts for sample in part] == list(range(n))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_each_purpose_has_numbers_of_its_own_in_all_versions():
    """A run may be resumed with a newer one."""
    first = [int(keyed_generator(3, 1, stream).integers(0, 1000)) for stream in RandomStream]
    assert first == [814, 373, 319, 211, 974, 132]


@given(order=orders, epoch=st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(order, epoch):
    samples = epoch_of(order, epoch)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(order.length))


@given(order=orders, epoch=st.integers(0, 5))
def test_ranks_together_see_the_global_batch_whatever_their_number(order, epoch):
    for batch in range(order.batches_per_epoch):
        everything = order.batch_indices(epoch, batch)
        for size in (1, 2, 3, 4, 6, 8):
            parts = [everything[part_of(len(everything), rank, size)] for rank in range(size)]
            assert np.array_equal(np.concatenate(parts), everything)


@given(order=orders, epoch=st.integers(0, 5), data=st.data())
def test_any_position_is_found_without_those_before_it(order, epoch, data):
    batch = data.draw(st.integers(0, order.batches_per_epoch - 1))
    whole = epoch_of(order, epoch)
    fresh = Order(order.length, order.global_batch, order.seed, order.shuffle, order.block_samples)
    begin = batch * order.global_batch
    assert np.array_equal(fresh.batch_indices(epoch, batch), whole[begin : begin + order.global_batch])


@given(order=orders)
def test_drop_last_leaves_out_only_the_smaller_batch(order):
    if order.length < order.global_batch:
        with pytest.raises(UserError, match="fills no global batch"):
            Order(order.length, order.global_batch, drop_last=True)
        return
    dropping = Order(order.length, order.global_batch, order.seed, order.shuffle, order.block_samples, drop_last=True)
    samples = epoch_of(dropping, 0)
    assert len(samples) == order.length - order.length % order.global_batch
    assert np.array_equal(samples, epoch_of(order, 0)[: len(samples)])


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_epochs_and_seeds_differ(shuffle):
    first = epoch_of(Order(1000, 50, seed=1, shuffle=shuffle, block_samples=8), 0)
    assert not np.array_equal(first, epoch_of(Order(1000, 50, seed=1, shuffle=shuffle, block_samples=8), 1))
    assert not np.array_equal(first, epoch_of(Order(1000, 50, seed=2, shuffle=shuffle, block_samples=8), 0))


def test_the_order_does_not_depend_on_the_global_batch():
    for shuffle in SHUFFLES:
        assert np.array_equal(epoch_of(Order(500, 7, 3, shuffle, 16), 2), epoch_of(Order(500, 64, 3, shuffle, 16), 2))


def test_block_shuffle_reads_few_blocks_at_a_time_yet_mixes_them():
    order = Order(102_400, 256, shuffle="block", block_samples=100)
    blocks = [set((order.batch_indices(0, batch) // 100).tolist()) for batch in range(order.batches_per_epoch)]
    assert max(map(len, blocks)) <= 2 * GROUP_BLOCKS  # a batch touches at most two groups
    assert min(map(len, blocks)) > GROUP_BLOCKS // 2
    assert len(set.union(*blocks[:6])) == GROUP_BLOCKS


def test_the_full_shuffle_is_uniform():
    first = [int(Order(10, 1, seed).batch_indices(0, 0)[0]) for seed in range(2000)]
    counts = np.bincount(first, minlength=10)
    assert counts.min() > 140 and counts.max() < 260  # 200 expected, 13.4 standard deviation


def test_the_order_is_pinned():
    """A changed order breaks resuming: the numbers here may only change with a note in the change log."""
    assert Order(10, 10, seed=7).batch_indices(3, 0).tolist() == [8, 4, 5, 3, 6, 0, 9, 7, 1, 2]
    assert Order(10, 10, seed=7, shuffle="block", block_samples=2).batch_indices(3, 0).tolist() == [
        5,
        8,
        4,
        3,
        7,
        9,
        1,
        0,
        2,
        6,
    ]


@pytest.mark.parametrize(
    ("length", "first"),
    [(2**23, [1581893, 5777516, 6170316, 5684026]), (2**24, [8507365, 3776958, 3702269, 6624282])],
)
def test_the_order_is_pinned_for_data_whose_order_is_held_in_memory_and_for_more(length, first):
    assert Order(length, 4, seed=7).batch_indices(3, 0).tolist() == first


def test_blocks_are_of_1024_samples_unless_another_number_is_given():
    given = Order(40_000, 64, seed=7, shuffle="block", block_samples=1024)
    assert np.array_equal(epoch_of(Order(40_000, 64, seed=7, shuffle="block"), 0), epoch_of(given, 0))


@pytest.mark.parametrize("arguments", [{"length": 0}, {"global_batch": 0}, {"block_samples": 0}, {"shuffle": "all"}])
def test_nonsense_is_refused(arguments):
    with pytest.raises(UserError):
        Order(**({"length": 10, "global_batch": 2} | arguments))  # type: ignore[arg-type]


def test_a_batch_beyond_the_epoch_is_an_error():
    with pytest.raises(IndexError):
        Order(10, 4).batch_indices(0, 3)

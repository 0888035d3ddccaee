"""What ranks train and validate on."""

import subprocess
import sys
import threading
from collections.abc import Generator
from itertools import count, islice

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.pipeline import Batch, TrainingData, ValidationData, prefetched
from hpctrain.data.samples import Recipe
from hpctrain.errors import UserError
from tests.support.mpi import PATIENCE_S

LENGTH = 53
DATASET = open_dataset({"x": np.random.default_rng(0).normal(size=(LENGTH, 4)), "y": np.arange(LENGTH)})


def noise(sample, rng):
    return {"x": sample["x"] + rng.normal(size=4), "y": sample["y"]}


def take(data: TrainingData, number: int, epoch: int = 0, batch: int = 0) -> list[Batch]:
    try:
        return list(islice(data.starting_at(epoch, batch), number))
    finally:
        data.close()


def joined(batch: Batch) -> dict[str, np.ndarray]:
    names = batch.micro_batches[0] if batch.micro_batches else {}
    return {name: np.concatenate([piece[name] for piece in batch.micro_batches]) for name in names}


@settings(max_examples=30)
@given(
    size=st.integers(1, 8),
    global_batch=st.integers(1, 60),
    accumulate=st.integers(1, 5),
    shuffle=st.sampled_from(["full", "block"]),
)
def test_all_ranks_together_get_each_global_batch_once(size, global_batch, accumulate, shuffle):
    order = Order(LENGTH, global_batch, 3, shuffle, 4)
    number = order.batches_per_epoch + 2
    ranks = [take(TrainingData(DATASET, order, rank, size, accumulate, prefetch=0), number) for rank in range(size)]
    for step, parts in enumerate(zip(*ranks, strict=True)):
        epoch, index = divmod(step, order.batches_per_epoch)
        expected = order.batch_indices(epoch, index)
        assert np.array_equal(np.concatenate([part.sample_ids for part in parts]), expected)
        assert sum(part.local_samples for part in parts) == parts[0].global_samples == len(expected)
        for part in parts:
            assert (part.epoch, part.index) == (epoch, index)
            assert part.ends_epoch == (index == order.batches_per_epoch - 1)
            assert len(part.micro_batches) == min(accumulate, part.local_samples)
            assert all(len(piece["y"]) for piece in part.micro_batches)
            if part.micro_batches:
                assert np.array_equal(joined(part)["y"], part.sample_ids)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_it_begins_anywhere(prefetch):
    order = Order(LENGTH, 8, 1)
    whole = take(TrainingData(DATASET, order, 0, 2, prefetch=prefetch), 20)
    later = take(TrainingData(DATASET, order, 0, 2, prefetch=prefetch), 20 - 9, *divmod(9, order.batches_per_epoch))
    for one, other in zip(whole[9:], later, strict=True):
        assert np.array_equal(one.sample_ids, other.sample_ids)
        assert (one.epoch, one.index) == (other.epoch, other.index)


def test_random_transforms_depend_on_seed_epoch_and_sample_only():
    order = Order(LENGTH, 12, 1)

    def by_sample(size, prefetch, seed=0, epoch=0):
        seen = {}
        for rank in range(size):
            data = TrainingData(DATASET, order, rank, size, 2, prefetch, recipe=Recipe(noise, seed=seed))
            for batch in take(data, order.batches_per_epoch, epoch):
                seen |= {
                    int(y): x.tobytes() for piece in batch.micro_batches for x, y in zip(*piece.values(), strict=True)
                }
        return seen

    first = by_sample(1, 0)
    assert first == by_sample(3, 2) == by_sample(8, 0)
    assert not set(first.values()) & set(by_sample(1, 0, epoch=1).values())
    assert not set(first.values()) & set(by_sample(1, 0, seed=1).values())


def test_a_failing_transform_names_the_sample():
    def fail(sample, rng):
        if sample["y"] == 17:
            raise ValueError("odd angle")
        return sample

    with pytest.raises(UserError, match=r"sample 17 in epoch 0: ValueError: odd angle \(test_pipeline.py:\d+ in fail"):
        take(TrainingData(DATASET, Order(LENGTH, 8), 0, 1, recipe=Recipe(fail)), 10)


def test_a_transform_that_changes_shapes_names_the_sample():
    def crop(sample, rng):
        return {"x": sample["x"][: 3 if sample["y"] == 17 else 2]}

    with pytest.raises(UserError, match=r"the transform gives x float64\[3\] for sample 17 where x float64\[2\]"):
        take(TrainingData(DATASET, Order(LENGTH, 8), 0, 1, recipe=Recipe(crop)), 10)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 60])
def test_validation_is_every_sample_once_in_order(size):
    seen = []
    for rank in range(size):
        data = ValidationData(DATASET, 7, rank, size)
        batches = list(data)
        assert len(batches) == len(data)
        seen += [y for batch in batches for y in batch["y"]]
    assert seen == list(range(LENGTH))


class Source:
    """Counts, and notes how far it got and whether it was closed."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.made = 0
        self.closed = False
        self.fail_at = fail_at
        self.reached = threading.Condition()

    def items(self) -> Generator[int, None, None]:
        try:
            for number in count():
                if number == self.fail_at:
                    raise OSError("broken")
                with self.reached:
                    self.made += 1
                    self.reached.notify_all()
                yield number
        finally:
            self.closed = True


class TestPrefetch:
    def test_it_is_ahead_by_its_depth_and_no_more(self):
        source = Source()
        items = prefetched(source.items(), 3)
        assert next(items) == 0
        with source.reached:
            assert source.reached.wait_for(lambda: source.made == 3, timeout=PATIENCE_S)
            assert not source.reached.wait_for(lambda: source.made > 3, timeout=0.2)
        assert [next(items) for _ in range(50)] == list(range(1, 51))
        items.close()
        assert source.closed
        assert source.made <= 54

    def test_errors_come_after_what_was_made_before_them(self):
        source = Source(fail_at=2)
        items = prefetched(source.items(), 5)
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(OSError, match="broken"):
            next(items)
        assert source.closed

    def test_it_ends_where_the_source_ends(self):
        assert list(prefetched((number for number in range(5)), 2)) == [0, 1, 2, 3, 4]

    def test_closing_leaves_no_thread(self):
        before = threading.active_count()
        items = prefetched(Source().items(), 2)
        next(items)
        assert threading.active_count() == before + 1
        items.close()
        assert threading.active_count() == before

    def test_at_the_exit_of_the_interpreter_one_that_was_left_is_closed(self):
        program = (
            "import sys, time\nfrom hpctrain.data.pipeline import prefetched\n"
            "def slow():\n    try:\n        yield 1\n        time.sleep(0.2)\n        yield 2\n"
            "    finally:\n        print('closed', flush=True)\n"
            "items = prefetched(slow(), 2)\nnext(items)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.stdout, done.stderr, done.returncode) == ("closed\n", "", 0)


def test_training_and_validation_may_read_one_chunked_file_at_once(tmp_path):
    values = np.random.default_rng(0).normal(size=(2000, 50))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(16, 50), compression="gzip")
    dataset = open_dataset(tmp_path / "a.h5", cache_bytes=100_000)
    data = TrainingData(dataset, Order(2000, 64), 0, 1, prefetch=4)
    batches = data.starting_at(0, 0)
    for held in ValidationData(dataset, 128, 0, 1):
        batch = next(batches)
        assert np.array_equal(joined(batch)["x"], values[batch.sample_ids])
        assert held["x"].shape[1:] == (50,)
    data.close()


class OneThreadOnly:
    """A dataset that notices when two threads read it."""

    def __init__(self) -> None:
        self.fields = DATASET.fields
        self.inside = 0
        self.waited = threading.Event()
        self.disturbed = False

    def __len__(self) -> int:
        return LENGTH

    def read(self, indices):
        self.inside += 1
        self.waited.wait(0.05)  # time for another to come in
        self.disturbed |= self.inside > 1
        self.inside -= 1
        return DATASET.read(indices)

    def fingerprint(self) -> str:
        return DATASET.fingerprint()


def test_training_and_validation_never_read_one_dataset_at_the_same_time():
    shared = OneThreadOnly()
    data = TrainingData(shared, Order(LENGTH, 8), 0, 1, prefetch=4)
    next(data.starting_at(0, 0))
    assert sum(len(batch["y"]) for batch in ValidationData(shared, 20, 0, 1)) == LENGTH
    data.close()
    assert not shared.disturbed

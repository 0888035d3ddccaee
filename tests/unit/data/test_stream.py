"""Streams: global batches from data that can only be read one sample after the other."""

import json
import random
import tracemalloc
from itertools import chain, islice

import numpy as np
import pytest

from hpctrain import open_stream
from hpctrain.data import samples
from hpctrain.data.pipeline import Batch
from hpctrain.data.samples import Recipe
from hpctrain.data.stream import StreamingData, StreamOrder, is_stream
from hpctrain.errors import UserError

LENGTH = 23


class Resumable:
    """A stream with a position, whose random numbers depend on all that came before."""

    def __init__(self, length: int | None = LENGTH) -> None:
        self.length = length
        self.index = 0
        self.rng = np.random.default_rng(0)
        self.made = 0

    def __iter__(self):
        while self.index != self.length:
            self.index += 1
            self.made += 1
            yield {"id": np.int64(self.index - 1), "x": self.rng.normal(size=2)}
        self.index = 0

    def state_dict(self) -> dict:
        state = self.rng.bit_generator.state["state"]
        return {"index": self.index, "rng": [str(state["state"]), str(state["inc"])]}

    def load_state_dict(self, saved: dict) -> None:
        self.index = saved["index"]
        state, inc = map(int, saved["rng"])
        self.rng.bit_generator.state = {**self.rng.bit_generator.state, "state": {"state": state, "inc": inc}}


class Again:
    """A stream that always begins at its beginning."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self):
        rng = np.random.default_rng(0)
        return ((np.int64(index), rng.normal(size=2)) for index in range(self.length))


def make(source, rank: int = 0, size: int = 1, drop_last: bool = False, prefetch: int = 2, **options) -> StreamingData:
    stream = open_stream(source, ("id", "x"))
    return StreamingData(stream, StreamOrder(5, drop_last), rank, size, 2, prefetch, **options)


def take(data: StreamingData, number: int, epoch: int = 0, batch: int = 0) -> list[Batch]:
    try:
        return list(islice(data.starting_at(epoch, batch), number))
    finally:
        data.close()


def told(batches: list[Batch]) -> list[tuple]:
    return [
        (batch.epoch, batch.index, int(i), x.tobytes())
        for batch in batches
        for piece in batch.micro_batches
        for i, x in zip(piece["id"], piece["x"], strict=True)
    ]


@pytest.mark.parametrize("kind", [Resumable, Again])
@pytest.mark.parametrize("drop_last", [False, True])
def test_all_ranks_together_get_the_stream_in_order(kind, drop_last):
    alone = take(make(kind(), drop_last=drop_last), 12)
    per_epoch = 20 if drop_last else LENGTH
    ids = [i for _, _, i, _ in told(alone)]
    assert ids == [index % per_epoch for index in range(len(ids))]
    assert (
        [batch.ends_epoch for batch in alone] == ([False] * 3 + [True]) * 3
        if drop_last
        else [(step + 1) % 5 == 0 for step in range(12)]
    )
    for size in (2, 3, 4, 7):
        ranks = [take(make(kind(), rank, size, drop_last), 12) for rank in range(size)]
        assert told([part for step in zip(*ranks, strict=True) for part in step]) == told(alone)
        for step, parts in enumerate(zip(*ranks, strict=True)):
            assert np.array_equal(np.concatenate([part.sample_ids for part in parts]), alone[step].sample_ids)
            assert {part.global_samples for part in parts} == {alone[step].global_samples}


@pytest.mark.parametrize("kind", [Resumable, Again])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 4), (4, 1)])
def test_it_resumes_at_every_batch_on_any_number_of_ranks(kind, drop_last, before, after):
    whole = told(take(make(kind(), drop_last=drop_last), 14))
    for steps in range(14):
        first = make(kind(), before - 1, before, drop_last)
        seen = take(first, steps)
        saved = json.loads(json.dumps(first.state_dict()))
        last = seen[-1] if seen else None
        at = (0, 0) if last is None else (last.epoch + 1, 0) if last.ends_epoch else (last.epoch, last.index + 1)
        rest = []
        for rank in range(after):
            data = make(kind(), rank, after, drop_last)
            data.load_state_dict(saved) if saved else None
            rest.append(take(data, 14 - steps, *at))
        done = {(epoch, index) for epoch, index, *_ in told(take(make(kind(), drop_last=drop_last), steps))}
        joined = told([part for step in zip(*rest, strict=True) for part in step])
        assert joined == [one for one in whole if one[:2] not in done]


def test_a_position_is_taken_up_without_what_came_before():
    data = make(Resumable(None))
    take(data, 1000)
    later = Resumable(None)
    resumed = make(later)
    resumed.load_state_dict(data.state_dict())
    assert take(resumed, 1, 0, 1000)[0].micro_batches[0]["id"][0] == 5000
    assert later.made < 50


def test_memory_is_bounded_on_an_endless_stream():
    data = make(Resumable(None))
    batches = data.starting_at(0, 0)
    for _ in range(50):
        next(batches)
    tracemalloc.start()
    for _ in range(2000):
        next(batches)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    data.close()
    assert grown < 200_000, "10000 samples of more than 100 bytes each have gone through"


def test_transforms_are_keyed_by_position_and_collate_gets_own_samples():
    def noise(sample, rng):
        return {**sample, "x": rng.normal(size=2)}

    def collate(samples):
        return {name: np.stack([sample[name] for sample in samples]) for name in ("id", "x")}

    recipe = Recipe(noise, collate, 3)
    alone = told(take(make(Again(), recipe=recipe), 7))
    ranks = [take(make(Again(), rank, 2, recipe=recipe), 7) for rank in range(2)]
    assert told([part for step in zip(*ranks, strict=True) for part in step]) == alone
    assert len({x for *_, x in alone}) == len(alone)


@pytest.mark.parametrize("source", [Resumable(), Again(), Resumable(4)])
def test_example_samples_are_the_first_ones_and_leave_the_stream_where_it_was(source):
    stream = open_stream(source, ("id", "x"))
    found = stream.example(6)
    assert found.arrays["id"].tolist() == list(range(min(6, source.length or 6)))
    assert next(iter(stream.undecoded()))["id"] == 0


class Coded(Again):
    """Gives text."""

    def __iter__(self):
        return (f"{index}:{index * index}" for index in range(self.length))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_decodes_what_it_trains_on(size):
    alone = [(index % LENGTH, (index % LENGTH) ** 2) for index in range(2 * LENGTH)]
    found, numbers = [], []
    for rank in range(size):
        calls = []

        def decode(text, calls=calls):
            calls.append(text)
            index, square = map(int, text.split(":"))
            return {"id": np.int64(index), "square": np.int64(square)}

        data = StreamingData(open_stream(Coded(), decode=decode), StreamOrder(5), rank, size, prefetch=0)
        found.append([batch.micro_batches for batch in take(data, 10)])
        numbers.append(len(calls) - 1)  # the first tells the shapes
    assert sum(numbers) == 2 * LENGTH and max(numbers) - min(numbers) <= 10
    joined = [piece for step in zip(*found, strict=True) for part in step for piece in part]
    assert [pair for piece in joined for pair in zip(*map(list, piece.values()), strict=True)] == alone


def test_what_a_resumed_run_passes_over_is_not_decoded():
    calls: list[str] = []
    stream = open_stream(Coded(), decode=lambda text: calls.append(text) or int(text.partition(":")[0]))
    take(StreamingData(stream, StreamOrder(5), 0, 1, prefetch=0), 1, batch=3)
    assert calls == ["0:0", *(f"{i}:{i * i}" for i in range(15, 20))]


def test_what_cannot_be_decoded_is_told():
    stream = open_stream(Coded(), decode=lambda text: 1 // (12 - int(text.partition(":")[0])))
    with pytest.raises(UserError, match=r"sample 12 of Coded cannot be decoded: ZeroDivisionError.*test_stream.py"):
        take(StreamingData(stream, StreamOrder(5), 0, 1), 4)


def test_a_first_sample_that_cannot_be_decoded_or_read_is_told():
    with pytest.raises(UserError, match=r"sample 0 of Coded cannot be decoded: ZeroDivisionError.*test_stream.py"):
        open_stream(Coded(), decode=lambda text: 1 // 0)

    class Broken:
        def __iter__(self):
            raise RuntimeError("no such bucket")

    with pytest.raises(UserError, match=r"Broken failed at its first sample: RuntimeError: no such bucket"):
        open_stream(Broken())


def test_an_open_stream_is_not_decoded_again():
    stream = open_stream(Again())
    assert open_stream(stream) is stream
    with pytest.raises(UserError, match="a stream that is open"):
        open_stream(stream, decode=dict)


class Reused(Again):
    """Gives one object again and again."""

    def __iter__(self):
        sample: dict = {}
        for index in range(self.length):
            sample["id"], sample["x"] = np.int64(index), np.zeros(2)
            yield sample


def test_a_source_may_give_the_same_dict_again():
    assert [i for *_, i, _ in told(take(make(Reused()), 5))] == list(range(LENGTH))


def failing():
    yield 1
    raise ValueError("bad line")


class Failing(Again):
    def __iter__(self):
        return failing()


class Shrinking(Again):
    def __iter__(self):
        self.length -= 3
        return super().__iter__()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Again(0), "the stream Again gives no samples"),
        (iter([1, 2]), "list_iterator can be read only once"),
        (3, "int is not a stream"),
        (["a", "b"], "'x' has dtype <U1, which is not a number"),
    ],
)
def test_what_is_no_stream(source, message):
    with pytest.raises(UserError, match=message):
        open_stream(source)


def test_errors_of_a_stream_are_told():
    with pytest.raises(UserError, match=r"Failing failed after sample 1: ValueError: bad line \(test_stream.py"):
        take(StreamingData(open_stream(Failing()), StreamOrder(5), 0, 1), 1)
    with pytest.raises(UserError, match="Shrinking gives no samples in epoch 0 behind the first 20"):
        take(make(Shrinking()), 1, 0, 4)
    with pytest.raises(UserError, match=r"gives no samples in epoch 0\n.*global batch below 5"):
        take(make(Again(4), drop_last=True), 1)


def test_what_is_taken_for_a_stream():
    assert is_stream(Resumable()) and is_stream(open_stream(Again()))
    assert not is_stream({"x": [1]}) and not is_stream("a.h5") and not is_stream(["a.h5"])


@pytest.mark.slow
def test_an_iterable_dataset_of_torch_is_a_stream():
    torch = pytest.importorskip("torch")

    class Lines(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self):
            return iter(torch.arange(6))

    assert is_stream(Lines()) and not is_stream(torch.utils.data.TensorDataset(torch.arange(3)))
    with pytest.raises(UserError, match="DataLoader gives batches, not samples"):
        open_stream(torch.utils.data.DataLoader(Lines()))
    data = StreamingData(open_stream(Lines()), StreamOrder(4), 0, 1)
    assert [batch.micro_batches[0]["x"].tolist() for batch in take(data, 2)] == [[0, 1, 2, 3], [4, 5]]


class Shuffled:
    """A stream that shuffles each epoch by a global generator."""

    def __init__(self, shuffle) -> None:
        self.shuffle = shuffle

    def __iter__(self):
        ids = list(range(LENGTH))
        self.shuffle(ids)
        return ((np.int64(index), np.zeros(2)) for index in ids)


class DrawingResumable(Resumable):
    """A stream with a position that takes its numbers from a global generator."""

    def __iter__(self):
        while self.index != self.length:
            self.index += 1
            yield {"id": np.int64(self.index - 1), "x": np.float64([random.random(), np.random.random()])}
        self.index = 0


def torch_shuffle(ids: list[int]) -> None:
    torch = pytest.importorskip("torch")
    ids[:] = [ids[at] for at in torch.randperm(len(ids)).tolist()]


def batches_by_ranks(source, epoch: int, batch: int, count: int) -> list[list[int]]:
    """The samples of global batches, whose parts two ranks read with global generators that differ."""
    parts = []
    for rank in (0, 1):
        random.seed(rank)
        np.random.seed(rank)
        data = make(source(), rank, 2)
        parts.append([values(batch) for batch in islice(data.starting_at(epoch, batch), count)])
        data.close()
    return [[*first, *second] for first, second in zip(*parts, strict=True)]


def values(batch: Batch) -> list[int]:
    return [int(each) for micro in batch.micro_batches for each in micro["id"]]


@pytest.mark.parametrize(
    "shuffle", [random.shuffle, np.random.shuffle, pytest.param(torch_shuffle, marks=pytest.mark.slow)]
)
def test_a_stream_that_shuffles_by_a_global_generator_is_equal_on_all_ranks(shuffle):
    seen = batches_by_ranks(lambda: Shuffled(shuffle), 0, 0, 10)
    first, second = [*chain(*seen[:5])], [*chain(*seen[5:])]
    assert sorted(first) == sorted(second) == list(range(LENGTH))
    assert first != second
    assert batches_by_ranks(lambda: Shuffled(shuffle), 1, 2, 3) == seen[7:]  # a run resumed in the second epoch


def test_a_position_restores_what_a_stream_draws_from_global_generators():
    def run(data, epoch, batch, count):
        return [
            micro["x"].tolist() for one in islice(data.starting_at(epoch, batch), count) for micro in one.micro_batches
        ]

    whole = run(make(DrawingResumable()), 0, 0, 8)
    data = make(DrawingResumable())
    begun = run(data, 0, 0, 3)
    random.seed(99)
    again = make(DrawingResumable())
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert begun + run(again, 0, 3, 5) == whole


def test_a_stream_leaves_the_models_generators_alone():
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    batches = make(Shuffled(random.shuffle)).starting_at(0, 0)
    assert [next(batches) and random.random() for _ in range(3)] == expected


class Drifting:
    """A stream whose second epoch differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.epoch = -1

    def __iter__(self):
        self.epoch += 1
        order = np.random.default_rng(max(0, self.epoch - 1) * self.rank).permutation(LENGTH)
        return ((np.int64(index), np.zeros(2)) for index in order)


def test_ranks_compare_whole_batches_also_in_the_second_epoch():
    def digests(rank):
        data = make(Drifting(rank), rank, 2)
        found = [data.digest for _ in islice(data.starting_at(0, 0), 8)]
        data.close()
        return found

    first, second = digests(0), digests(1)
    assert [bool(one) for one in first] == [step in (1, 2, 4, 8) for step in range(1, 9)]
    assert first[:7] == second[:7]
    assert first[7] != second[7]


class IterableDataset:
    """Like that of Hugging Face: its state is that of the last iterator, and is loaded by the next one."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self) -> None:
        self.at, self.start, self.epoch = 0, 0, 0

    def __iter__(self):
        for index in range(self.start, LENGTH):
            self.at = index + 1
            yield {"id": np.int64(index), "x": np.float64([self.epoch, 0])}

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, saved: dict) -> None:
        self.start = saved["at"]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_stream_of_hugging_face_loses_no_sample_and_resumes_exactly():
    def run(epoch, batch, count):
        data = make(IterableDataset())
        items = islice(data.starting_at(epoch, batch), count)
        pieces = [piece for one in items for piece in one.micro_batches]
        found = [(int(at), int(x[0])) for piece in pieces for at, x in zip(piece["id"], piece["x"], strict=True)]
        data.close()
        return found

    whole = run(0, 0, 10)
    assert whole == [(at, epoch) for epoch in (0, 1) for at in range(LENGTH)]
    assert run(0, 2, 8) == whole[10:]
    assert run(1, 1, 4) == whole[LENGTH + 5 :]


def test_numbers_in_lists_are_not_looked_at_one_by_one(monkeypatch):
    """Tokens of Hugging Face's datasets are lists; hundreds of calls took 17 times as long as to make the array."""
    calls = []
    original = samples.host
    monkeypatch.setattr(samples, "host", lambda value: calls.append(value) or original(value))
    torch = pytest.importorskip("torch")
    given = {"ids": list(range(512)), "pair": [[1, 2.0], [True, 3]], "mixed": [torch.ones(2), 1]}
    found = samples.host(given)
    assert found["ids"] == tuple(range(512)) and found["pair"] == ((1, 2.0), (True, 3))
    assert isinstance(found["mixed"][0], np.ndarray) and len(calls) < 10


def test_a_resumed_run_notices_that_a_stream_gives_other_samples():
    first = make(Again())
    take(first, 6)
    saved = json.loads(json.dumps(first.state_dict()))
    for source, changes in ((Again(), False), (Shuffled(lambda ids: ids.reverse()), True)):
        resumed = make(source)
        resumed.load_state_dict(saved)
        assert resumed.state_dict() == saved
        ids = [values(batch) for batch in take(resumed, 2, 1, 1)]
        assert (("another sample 4 than before" in resumed.changed), resumed.changed == "") == (changes, not changes)
        assert changes or ids == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]

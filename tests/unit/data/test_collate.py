"""Samples of variable length: ragged data, collate, padding."""

import functools
from itertools import islice

import numpy as np
import pytest

import hpctrain
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order
from hpctrain.data.packing.pack_source import from_dataset
from hpctrain.data.pipeline import Batch, TrainingData, ValidationData
from hpctrain.data.samples import Recipe
from hpctrain.errors import UserError

LENGTH = 31
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(1, 100, RNG.integers(0, 9)) for _ in range(LENGTH)]
RAGGED = open_dataset({"tokens": TOKENS, "label": np.arange(LENGTH)})
PAD = functools.partial(hpctrain.pad, fields=["tokens"], multiple_of=4, mask="mask")


def halve(sample, rng):
    return {**sample, "tokens": sample["tokens"][: rng.integers(1, 5)]}


def take(number: int, rank: int = 0, size: int = 1, workers: int = 0, **options) -> list[Batch]:
    dataset = options.pop("dataset", RAGGED)
    data = TrainingData(dataset, Order(LENGTH, 8, 1), rank, size, 2, workers=workers, recipe=Recipe(**options))
    try:
        return list(islice(data.starting_at(0, 0), number))
    finally:
        data.close()


def rows(batches: list[Batch]) -> list[tuple[int, list[int]]]:
    """(label, tokens without padding) of each sample."""
    return [
        (int(label), tokens[mask].tolist())
        for batch in batches
        for piece in batch.micro_batches
        for tokens, label, mask in zip(piece["tokens"], piece["label"], piece["mask"], strict=True)
    ]


def test_arrays_of_different_lengths_are_a_field():
    field = RAGGED.fields["tokens"]
    assert field.shape == (-1,) and field.is_ragged and field.dtype == np.int64
    read = RAGGED.read(np.array([3, 0]))
    assert [tokens.tolist() for tokens in read["tokens"]] == [TOKENS[3].tolist(), TOKENS[0].tolist()]
    read["tokens"][0][:] = 0
    assert TOKENS[3].all(), "what is read may be changed"
    other = open_dataset({"tokens": [*TOKENS[:-1], TOKENS[-1][::-1] + 1], "label": np.arange(LENGTH)})
    assert other.fingerprint() != RAGGED.fingerprint() == open_dataset(dict(RAGGED.arrays)).fingerprint()  # type: ignore[attr-defined]
    lists = open_dataset({"x": [[1, 2], [], [3]]})
    assert lists.fields["x"].dtype == np.int64 and lists.read(np.array([1]))["x"][0].shape == (0,)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": [[1], [[2, 3]]]}, "the samples of 'x' have 1 to 2 axes"),
        ({"x": [np.array(["a"]), np.array(["b", "c"])]}, "'x' has dtype <U1, which is not a number"),
        ({"x": [[1], [2, 3]], "y": [1, 2, 3]}, "different numbers of samples: 'x' 2, 'y' 3"),
    ],
)
def test_ragged_arrays_that_cannot_be_trained_on(arrays, message):
    with pytest.raises(UserError, match=message):
        open_dataset(arrays)


def test_ragged_samples_without_collate_are_refused_by_their_number():
    with pytest.raises(UserError, match=r"the data gives .* for sample \d+ where .*was expected\n.*a collate"):
        take(4)
    with pytest.raises(UserError, match="'tokens' differ in shape, which HDF5 arrays cannot hold"):
        from_dataset(RAGGED)


@pytest.mark.parametrize("workers", [0, 1])
def test_padded_batches_hold_each_sample_whatever_the_number_of_ranks(workers):
    alone = take(8, collate=PAD)
    expected = [(i, TOKENS[i].tolist()) for batch in alone for i in batch.sample_ids.tolist()]
    assert rows(alone) == expected
    parts = [take(8, rank, 3, workers=workers, collate=PAD) for rank in range(3)]
    assert rows([part for step in zip(*parts, strict=True) for part in step]) == expected
    lengths = {piece["tokens"].shape[1] for batch in alone for piece in batch.micro_batches}
    assert lengths <= {0, 4, 8} and len(lengths) > 1


def test_collate_follows_the_transform():
    batches = take(4, collate=PAD, transform=halve, workers=1)
    assert rows(batches) == rows(take(4, collate=PAD, transform=halve))
    assert max(len(tokens) for _, tokens in rows(batches)) == 4


def test_validation_is_collated():
    seen = [
        len(tokens[mask])
        for batch in ValidationData(RAGGED, 7, 0, 1, recipe=Recipe(collate=PAD))
        for tokens, _, mask in zip(*batch.values(), strict=True)
    ]
    assert seen == [len(tokens) for tokens in TOKENS]


def test_padding():
    samples = [
        {"a": np.arange(3.0), "b": np.ones((2, 1), np.int8), "y": np.int64(1)},
        {"a": np.arange(1.0), "b": np.ones((1, 2), np.int8), "y": np.int64(2)},
    ]
    batch = hpctrain.pad(samples, fields=["a", "b"], value={"b": -1}, length=4, mask="m")
    assert batch["a"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]
    assert batch["b"].tolist() == [[[1, -1], [1, -1], [-1, -1], [-1, -1]], [[1, 1], [-1, -1], [-1, -1], [-1, -1]]]
    assert batch["b"].dtype == np.int8 and batch["y"].tolist() == [1, 2]
    assert batch["m"].tolist() == [[True, True, True, False], [True, False, False, False]]
    assert hpctrain.pad(samples, fields=["a", "b"], multiple_of=3)["a"].shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ["c"]}, "samples have no array 'c' with an axis to pad\n  fix: name some of a, y"),
        ({"fields": ["y"]}, "no array 'y' with an axis"),
        ({"fields": []}, "no fields are named"),
        ({"fields": ["a"], "length": 2}, "'a' has 3 values along its first axis, and length is 2"),
    ],
)
def test_padding_that_cannot_be(options, message):
    samples = [{"a": np.arange(3), "y": np.int64(1)}, {"a": np.arange(1), "y": np.int64(2)}]
    with pytest.raises(UserError, match=message):
        hpctrain.pad(samples, **options)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda samples: 1 / 0, r"collate failed on samples \d+, \d+, \d+, \d+: ZeroDivisionError: .*test_collate.py"),
        (
            lambda samples: [tokens.sum() for tokens, label in samples],  # as a DataLoader's, which gets tuples
            r"fix: correct collate: collate\(samples\) gets a list of dicts of NumPy arrays, here \w+ ",
        ),
        (lambda samples: {"x": np.zeros(2)}, r"collate gives x float64\[2\] for 4 samples"),
        (lambda samples: {}, "collate gives nothing for 4 samples"),
        (lambda samples: {"x": np.array(["a"] * 4)}, "collate gives 'x' with dtype <U1"),
    ],
)
def test_a_wrong_collate_is_named(collate, message):
    with pytest.raises(UserError, match=message):
        take(1, collate=collate)


@pytest.mark.slow
def test_samples_of_a_torch_dataset_may_differ():
    import torch

    class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self):
            return LENGTH

        def __getitem__(self, index):
            return {"tokens": torch.from_numpy(TOKENS[index]), "label": index}

    assert rows(take(4, dataset=open_dataset(Sentences(), ragged=True), collate=PAD)) == rows(take(4, collate=PAD))
    with pytest.raises(UserError, match=r"Sentences gives .* for sample"):
        open_dataset(Sentences()).read(np.arange(4))

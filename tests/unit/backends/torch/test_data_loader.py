"""DataLoaders as data: what is taken from them, and the one thing that is named where something cannot be."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from hpctrain.data.dataset import SeededDataset
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Epoch, first_draw
from hpctrain.data.samples import Recipe, make_batch
from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask

torch = pytest.importorskip("torch")
data = torch.utils.data

from hpctrain.backends.torch.task.data_loader import Batches, without_loaders  # noqa: E402 (torch may be missing)

N = 12
PAIRS = data.TensorDataset(torch.arange(N * 3, dtype=torch.float32).reshape(N, 3), torch.arange(N))
BATCHES = Batches((8, 4, 2), "full", drop_last=False)


class Words(data.Dataset[dict[str, Any]]):
    """Tokens of different lengths, and a label that is a plain number."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.arange(1 + index % 3), "label": index}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = torch.nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    assert all(type(sample["label"]) is int for sample in samples), "as the dataset gives it"
    return {"tokens": tokens, "label": torch.tensor([sample["label"] for sample in samples])}


def scaled(samples: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    return torch.stack([x for x, _ in samples]) * 10, torch.stack([y for _, y in samples])


def task(train: Any, validation: Any = None, batches: Batches = BATCHES, **fields: Any) -> TorchTask:
    made = without_loaders(TorchTask(model=None, train=train, validation=validation, **fields), batches)
    assert isinstance(made, TorchTask)
    return made


def order(made: TorchTask, index: int = 0) -> list[int]:
    assert made.sampler is not None
    return made.sampler(Epoch(index, np.random.default_rng(index), N, 8)).tolist()


@pytest.mark.parametrize("size", [8, 4, 2])
def test_a_shuffling_loader_is_its_dataset(size):
    made = task(data.DataLoader(PAIRS, size, shuffle=True, num_workers=2), data.DataLoader(PAIRS, 5))
    assert made.train is PAIRS
    assert made.validation is PAIRS
    assert made.sampler is None, "data.shuffle does it"
    assert made.collate is None


def test_a_loader_that_does_not_shuffle_keeps_the_order():
    assert order(task(data.DataLoader(PAIRS, 4))) == list(range(N))
    assert task(data.DataLoader(PAIRS, 4), batches=Batches((8, 4, 4), "none", drop_last=False)).sampler is None


def test_known_samplers_are_taken():
    weights = [0.0] * (N - 1) + [1.0]
    drawn = task(data.DataLoader(PAIRS, 4, sampler=data.WeightedRandomSampler(weights, 7)))
    assert order(drawn) == [N - 1] * 7
    subset = task(data.DataLoader(PAIRS, 4, sampler=data.SubsetRandomSampler([1, 3, 5, 7])))
    assert sorted(order(subset)) == [1, 3, 5, 7]
    assert order(subset, 0) != order(subset, 1)
    few = task(data.DataLoader(PAIRS, 4, sampler=data.RandomSampler(PAIRS, num_samples=5)))
    assert len(set(order(few))) == 5
    apart = data.DistributedSampler(PAIRS, num_replicas=2, rank=1, shuffle=False)
    assert order(task(data.DataLoader(PAIRS, 4, sampler=apart))) == list(range(N)), "hpctrain shares it out itself"


@pytest.mark.parametrize(("dataset", "collate_fn"), [(Words(), padded), (PAIRS, scaled)])
def test_collate_fn_gives_the_batches_that_the_loader_gives(dataset, collate_fn):
    loader = data.DataLoader(dataset, 4, collate_fn=collate_fn)
    made = task(loader, data.DataLoader(dataset, 3, collate_fn=collate_fn))
    expected = next(iter(loader))
    expected = expected if isinstance(expected, dict) else dict(zip("xy", expected, strict=True))
    opened = open_dataset(made.train, ragged=True)
    batch = make_batch(opened, Recipe(collate=made.collate), first_draw(np.arange(4)))
    assert list(batch) == list(expected)
    for name, array in batch.items():
        assert np.array_equal(array, expected[name])
        assert array.dtype == expected[name].numpy().dtype


class Odd(data.Sampler[int]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(range(0, N, 2))


WRONG = {
    "size": (
        lambda: task(data.DataLoader(PAIRS, 3)),
        "batch_size=3, and .* 8 samples an update, 4",
        "batch_per_rank to 3",
    ),
    "drop_last": (lambda: task(data.DataLoader(PAIRS, 4, drop_last=True)), "drop_last=True", "data.drop_last: true"),
    "sampler": (lambda: task(data.DataLoader(PAIRS, 4, sampler=Odd())), "train has an Odd", "sampler="),
    "two_samplers": (
        lambda: task(data.DataLoader(PAIRS, 4, shuffle=True), sampler=lambda epoch: np.arange(3)),
        "RandomSampler, and the task a sampler",
        "one of them",
    ),
    "unshuffled": (
        lambda: task(data.DataLoader(PAIRS, 4, shuffle=True), batches=Batches((4, 4, 4), "none", drop_last=False)),
        "shuffles, and data.shuffle is none",
        "data.shuffle: full",
    ),
    "batches": (
        lambda: task(data.DataLoader(PAIRS, batch_sampler=data.BatchSampler(Odd(), 4, True), collate_fn=scaled)),
        "without batch_size, or with a batch_sampler",
        "give it batch_size",
    ),
    "no_batches": (lambda: task(data.DataLoader(PAIRS, batch_size=None)), "without batch_size", "give it batch_size"),
    "collates": (
        lambda: task(data.DataLoader(PAIRS, 4, collate_fn=scaled), data.DataLoader(PAIRS, 4)),
        "different collate_fn",
        "same collate_fn",
    ),
    "validation": (
        lambda: task(PAIRS, {"dev": data.DataLoader(PAIRS, 4, sampler=data.SubsetRandomSampler([1]))}),
        "validation has a SubsetRandomSampler",
        "Subset",
    ),
    "validation_rest": (lambda: task(PAIRS, data.DataLoader(PAIRS, 5, drop_last=True)), "drop_last", "leave it out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_one_thing_that_would_mean_something_else_is_named(case):
    make, what, fix = WRONG[case]
    with pytest.raises(UserError, match=what) as caught:
        make()
    assert fix in caught.value.fix


def test_tasks_without_loaders_are_left_alone():
    arrays = {"x": np.ones((3, 2))}
    given = TorchTask(model=None, train=arrays, validation={"a": arrays})
    assert without_loaders(given, BATCHES) is given


def test_a_dataset_of_hugging_face_is_read_like_one_of_torch():
    class Dataset:
        __module__ = "datasets.arrow_dataset"
        format: ClassVar[dict[str, str | None]] = {"type": None}

        def __len__(self):
            return N

        def __getitem__(self, index):
            return {"pixels": [float(index), 0.0], "label": index}

    opened = open_dataset(Dataset())
    assert opened.read(np.array([2, 0]))["pixels"].tolist() == [[2.0, 0.0], [0.0, 0.0]]
    assert not isinstance(opened, SeededDataset)
    Dataset.format = {"type": "custom"}  # has a transform, which may draw random numbers
    assert isinstance(open_dataset(Dataset()), SeededDataset)

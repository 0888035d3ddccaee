"""torch Datasets that draw random numbers themselves: generators keyed by seed, epoch and sample."""

import functools
import random
import threading
from itertools import islice

import numpy as np
import pytest

from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.global_generators import states
from hpctrain.data.order import Order
from hpctrain.data.pipeline import TrainingData, ValidationData
from hpctrain.data.samples import Recipe
from hpctrain.data.stream import digest_of
from hpctrain.rank.problem import with_input
from hpctrain.tasks.definition import TorchTask

torch = pytest.importorskip("torch")
LENGTH = 11


class Noisy(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    """Draws from all three generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict:
        return {"id": index, "x": np.array([random.random(), np.random.random(), float(torch.rand(()))])}


def shaken(samples: list[dict]) -> dict:
    """A collate that draws from all three generators, as torchvision's MixUp does."""
    noise = random.random() + np.random.random() + float(torch.rand(()))
    return {"id": np.array([each["id"] for each in samples]), "x": np.array([noise + each["id"] for each in samples])}


def by_sample(rank: int, size: int, dataset=None, epoch: int = 0, seed: int = 5, **options) -> dict[int, bytes]:
    options = {"recipe": Recipe(seed=seed)} | options
    data = TrainingData(dataset or open_dataset(Noisy()), Order(LENGTH, 4), rank, size, **options)
    try:
        batches = list(islice(data.starting_at(epoch, 0), data.order.batches_per_epoch))
    finally:
        data.close()
    pieces = [piece for batch in batches for piece in batch.micro_batches]
    return {int(i): x.tobytes() for piece in pieces for i, x in zip(piece["id"], piece["x"], strict=True)}


def test_what_a_dataset_draws_depends_on_seed_epoch_and_sample_only():
    alone = by_sample(0, 1)
    assert len(set(alone.values())) == LENGTH
    assert alone == by_sample(0, 1, prefetch=3, accumulate=2)
    assert alone == by_sample(0, 3) | by_sample(1, 3) | by_sample(2, 3)
    assert not set(alone.values()) & set(by_sample(0, 1, epoch=1).values())
    assert not set(alone.values()) & set(by_sample(0, 1, seed=6).values())


def test_worker_processes_draw_the_same():
    assert by_sample(0, 1, open_dataset(functools.partial(Noisy)), workers=1) == by_sample(0, 1)


def state() -> str:
    """Of the model's generators."""
    return digest_of(states())


def test_what_a_collate_draws_depends_on_seed_epoch_and_first_sample_and_no_thread_draws():
    model = torch.nn.Linear(1, 1)
    task = TorchTask(model, "mse", torch.optim.SGD(model.parameters()), collate=shaken)
    data, before = open_dataset({"id": np.arange(LENGTH)}), state()
    recipe = with_input(task, data, seed=5)[1]
    found = [by_sample(0, 1, data, recipe=recipe, workers=workers) for workers in (0, 0, 1)]
    assert found[0] == found[1] == found[2] and len(set(found[0].values())) == LENGTH and state() == before
    assert by_sample(0, 1, data, recipe=recipe, epoch=1) != found[0]
    ahead = TrainingData(data, Order(LENGTH, 4), 0, 1, recipe=recipe)
    next(ahead.starting_at(0, 0))
    assert "hpctrain-prefetch" not in [thread.name for thread in threading.enumerate()]
    ahead.close()


def paired(samples: list[dict]) -> dict:
    """A collate that gives each sample another one as a partner."""
    ids = np.array([each["id"] for each in samples])
    return {"id": ids, "partner": ids[torch.randperm(len(ids)).numpy()]}


def alone(samples: list[dict]) -> dict:
    """A collate for batches of one sample."""
    (sample,) = samples
    return {"id": np.array([sample["id"]]), "x": np.zeros(1)}


@pytest.mark.parametrize(("collate", "draws"), [(shaken, True), (paired, True), (alone, False)])
def test_a_collate_is_seen_to_draw_also_if_it_permutes_samples(collate, draws):
    model = torch.nn.Linear(1, 1)
    task = TorchTask(model, "mse", torch.optim.SGD(model.parameters()), collate=collate)
    before = state()
    assert with_input(task, open_dataset({"id": np.arange(LENGTH)}), seed=5)[1].draws is draws and state() == before


def test_the_generators_of_the_model_are_left_alone():
    before = state()
    dataset = open_dataset(Noisy())
    by_sample(0, 1, dataset, prefetch=3)
    first = np.concatenate([batch["x"] for batch in ValidationData(dataset, 4, 0, 1)])
    assert state() == before
    random.random()
    assert np.array_equal(first, np.concatenate([batch["x"] for batch in ValidationData(dataset, 3, 0, 1)]))


def test_datasets_of_tensors_are_read_ahead():
    tensors = torch.utils.data.TensorDataset(torch.arange(6))
    parts = torch.utils.data.ConcatDataset([torch.utils.data.Subset(tensors, [1, 3]), tensors])
    data = TrainingData(open_dataset(parts, ["x"]), Order(8, 4, shuffle="none"), 0, 1, prefetch=2)
    batches = data.starting_at(0, 0)
    assert next(batches).micro_batches[0]["x"].tolist() == [1, 3, 0, 1]
    assert "hpctrain-prefetch" in [thread.name for thread in threading.enumerate()]
    data.close()
    noisy = TrainingData(open_dataset(Noisy()), Order(LENGTH, 4), 0, 1, prefetch=2)
    next(noisy.starting_at(0, 0))
    assert "hpctrain-prefetch" not in [thread.name for thread in threading.enumerate()]
    noisy.close()

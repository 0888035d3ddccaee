"""Torch Datasets, and datasets of Hugging Face, as Datasets. Imported only for such data, since it imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils import data

from hpctrain.data.dataset import Field, Samples, fields_like, users_code
from hpctrain.data.global_generators import kept, seed_all
from hpctrain.data.samples import Sample, host, layout, named, stack
from hpctrain.errors import UserError
from hpctrain.system.array_types import Ints


@dataclass(eq=False)
class TorchDataset:
    """Reads a torch Dataset sample by sample. Make it with ``adapted``, which checks the dataset."""

    source: Any
    fields: Mapping[str, Field]
    names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Ints) -> Samples:
        return self._stack(indices, (sample_of(self.source, index, self.names) for index in indices.tolist()))

    def _stack(self, indices: Ints, samples: Iterator[Sample]) -> Samples:
        return stack(samples, indices.tolist(), type(self.source).__name__, self.fields)

    def fingerprint(self) -> str:
        """Hash of class, length and fields only: the content may be random and slow to read."""
        source = type(self.source)
        return hashlib.sha256(f"{source.__qualname__} {len(self)} {layout(self.fields)}".encode()).hexdigest()


class SeededTorchDataset(TorchDataset):
    """A torch Dataset whose code may draw random numbers."""

    def read_seeded(self, indices: Ints, seeds: Ints) -> Samples:
        keys = zip(indices.tolist(), seeds.tolist(), strict=True)
        with kept():
            return self._stack(indices, (seeded_sample(self.source, index, self.names, seed) for index, seed in keys))


def seeded_sample(source: Any, index: int, names: tuple[str, ...] | None, seed: int) -> Sample:
    """Reads one sample after seeding the global generators."""
    seed_all(seed)
    return sample_of(source, index, names)


def never_draws(source: Any) -> bool:
    """Whether reading surely draws no random numbers: TensorDatasets, and subsets and concatenations of them."""
    if type(source) is data.Subset:
        return never_draws(source.dataset)
    if type(source) is data.ConcatDataset:
        return all(map(never_draws, source.datasets))
    return type(source) is data.TensorDataset or (is_hugging_face(source) and source.format["type"] != "custom")


def is_hugging_face(source: Any) -> bool:
    """Whether this is a ``datasets.Dataset``; ``custom`` is the format of one with a transform."""
    return any(
        f"{kind.__module__}.{kind.__name__}" == "datasets.arrow_dataset.Dataset" for kind in type(source).__mro__
    )


def adapted(source: Any, names: tuple[str, ...] | None, ragged: bool = False) -> TorchDataset:
    """Adapts a map-style torch Dataset whose samples are dicts, tuples or single tensors, arrays or numbers.

    With ``ragged``, arrays may differ in shape, but not in the number of axes. Raises UserError.
    """
    kind = type(source).__name__
    if isinstance(source, data.DataLoader):
        fix = "give its .dataset: hpctrain orders, batches and prefetches"
        raise UserError("a torch DataLoader was given as data", fix)
    is_known = isinstance(source, data.Dataset) or is_hugging_face(source)
    if not is_known or isinstance(source, data.IterableDataset):
        fix = "give a map-style torch Dataset (__getitem__ and __len__), or pack it"
        raise UserError(f"{kind} has no random access", fix)
    try:
        length = len(source)  # not all have one
    except (TypeError, NotImplementedError) as error:
        fix = "give it a __len__ that returns its number of samples"
        raise UserError(f"the torch Dataset {kind} has no length", fix) from error
    if length == 0:
        raise UserError(f"the torch Dataset {kind} holds no samples", "give data with at least one sample")
    with kept():
        first = seeded_sample(source, 0, names, 0)
    dataset = TorchDataset if never_draws(source) else SeededTorchDataset
    return dataset(source, fields_like(first, length, ragged, kind), names)


def sample_of(source: Any, index: int, names: tuple[str, ...] | None) -> Sample:
    """Reads one sample's arrays. Raises UserError that names the sample if the user's code fails."""
    with users_code(f"{type(source).__name__} failed on sample {index}", "correct the dataset, or the sample"):
        return named(host(source[index]), names)

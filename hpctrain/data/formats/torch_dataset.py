"""A map-style torch Dataset as a Dataset."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.dataset import Field, Samples, check_field
from hpctrain.data.place import with_place
from hpctrain.data.samples import Sample, layout, named, stack
from hpctrain.errors import UserError


class TorchDataset:
    """Samples of a torch Dataset, one by one. Use ``from_torch``, which checks it."""

    def __init__(self, source: Any, fields: Mapping[str, Field], names: tuple[str, ...] | None) -> None:
        self.source = source
        self.fields = fields
        self.names = names

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: NDArray[np.int64]) -> Samples:
        return self._stack(indices, (sample_of(self.source, index, self.names) for index in indices.tolist()))

    def _stack(self, indices: NDArray[np.int64], samples: Iterator[Sample]) -> Samples:
        return stack(samples, indices.tolist(), type(self.source).__name__, self.fields)

    def fingerprint(self) -> str:
        """Of class, length and fields only: the content may be random, and reading it may be slow."""
        source = type(self.source)
        return hashlib.sha256(f"{source.__qualname__} {len(self)} {layout(self.fields)}".encode()).hexdigest()


class SeededTorchDataset(TorchDataset):
    """A torch Dataset whose code may draw random numbers."""

    def read_seeded(self, indices: NDArray[np.int64], seeds: NDArray[np.int64]) -> Samples:
        keys = zip(indices.tolist(), seeds.tolist(), strict=True)
        with kept_random_state():
            return self._stack(indices, (seeded_sample(self.source, index, self.names, seed) for index, seed in keys))


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Global generators are afterwards what they were before; torch's on GPUs are left alone."""
    python, legacy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.default_generator.set_state(torch_state)


def seeded_sample(source: Any, index: int, names: tuple[str, ...] | None, seed: int) -> Sample:
    """One sample, for which global generators begin at this seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    return sample_of(source, index, names)


def never_draws(source: Any) -> bool:
    """Whether reading is known to draw no random numbers: tensors, and parts and rows of such datasets."""
    data = torch.utils.data
    if type(source) is data.Subset:
        return never_draws(source.dataset)
    if type(source) is data.ConcatDataset:
        return all(map(never_draws, source.datasets))
    return type(source) is data.TensorDataset


def from_torch(source: Any, names: tuple[str, ...] | None, ragged: bool = False) -> TorchDataset:
    """A map-style torch Dataset whose samples are dicts, tuples or single tensors, arrays or numbers.

    With ``ragged`` their arrays may differ in shape, but not in the number of axes.
    """
    kind = type(source).__name__
    if isinstance(source, torch.utils.data.DataLoader):
        raise UserError(
            "a torch DataLoader was given as data", "give its .dataset: hpctrain orders, batches and prefetches"
        )
    if not isinstance(source, torch.utils.data.Dataset) or isinstance(source, torch.utils.data.IterableDataset):
        raise UserError(
            f"{kind} has no random access", "give a map-style torch Dataset (__getitem__ and __len__), or pack it"
        )
    try:
        length = len(source)  # type: ignore[arg-type]  # not all have one
    except (TypeError, NotImplementedError) as error:
        raise UserError(
            f"the torch Dataset {kind} has no length", "give it a __len__ that returns its number of samples"
        ) from error
    if length == 0:
        raise UserError(f"the torch Dataset {kind} holds no samples", "give data with at least one sample")
    with kept_random_state():
        first = seeded_sample(source, 0, names, 0)
    shapes = {name: (-1,) * value.ndim if ragged else value.shape for name, value in first.items()}
    fields = {name: check_field(name, (length, *shapes[name]), value.dtype, kind) for name, value in first.items()}
    return (TorchDataset if never_draws(source) else SeededTorchDataset)(source, fields, names)


def sample_of(source: Any, index: int, names: tuple[str, ...] | None) -> Sample:
    """One sample's arrays; raises UserError naming it if the user's code fails."""
    try:
        sample = source[index]
        if isinstance(sample, Mapping):
            return named({name: host(value) for name, value in sample.items()}, names)
        return named(tuple(map(host, sample)) if isinstance(sample, (tuple, list)) else host(sample), names)
    except Exception as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{type(source).__name__} failed on sample {index}: {with_place(error)}",
            "correct the dataset, or the sample",
        ) from error


def host(value: Any) -> Any:
    """A tensor as an array in host memory; anything else as it is."""
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value

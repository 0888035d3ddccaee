"""How many tokens a batch has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpctrain.data.formats.hdf5 import Hdf5Dataset
from hpctrain.data.formats.sources import CalledDataset, ConcatDataset
from hpctrain.data.packing.pack_source import packed_notes
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array

CountTokens = Callable[[Mapping[str, Array]], int]


def token_counter(name: str | None, dataset: Any) -> CountTokens | None:
    """A function that counts a batch's tokens; None if nothing says what a token is.

    Args:
        name: the task's ``tokens``.
        dataset: training data. Each sample of text that ``hpctrain data pack`` made has as many tokens as its context.
    """
    if name is not None:
        return functools.partial(entries, name)
    context = context_of(dataset)
    return None if context is None else lambda batch: context * len(next(iter(batch.values())))


def entries(name: str, batch: Mapping[str, Array]) -> int:
    """Entries of an array of a batch; of a boolean one, those that are true."""
    if name not in batch:
        what = f"tokens of the task is {name!r}, and its batches have no such array"
        raise UserError(what, f"name one of {', '.join(batch)}")
    array = batch[name]
    return int(np.count_nonzero(array)) if array.dtype == np.bool_ else array.size


def context_of(dataset: Any) -> int | None:
    """The context of packed text; None for other data."""
    while isinstance(dataset, (CalledDataset, ConcatDataset)):
        dataset = dataset.dataset if isinstance(dataset, CalledDataset) else dataset.parts[0]
    is_text = isinstance(dataset, Hdf5Dataset) and "tokens" in dataset.fields
    return packed_notes(dataset.path).get("context") if is_text else None

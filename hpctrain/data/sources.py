"""From whatever the user calls data to a Dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.data.dataset import Dataset, choose
from hpctrain.data.memory import from_arrays


def open_dataset(source: Any, fields: Sequence[str] | None = None) -> Dataset:
    if isinstance(source, Dataset):
        return source
    if isinstance(source, Mapping):
        names = choose(list(source), None if fields is None else tuple(fields), "the dict of arrays")
        return from_arrays({name: source[name] for name in names})
    raise NotImplementedError

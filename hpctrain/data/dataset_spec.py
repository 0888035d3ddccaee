"""How worker processes come to the same dataset: it is described by plain values, and opened again from these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.concat import ConcatDataset
from hpctrain.data.formats.hdf5 import Hdf5Dataset, open_hdf5
from hpctrain.data.formats.memory import ArrayDataset, from_arrays
from hpctrain.data.formats.sources import CalledDataset, open_dataset
from hpctrain.data.reference import refer, refusal, resolve
from hpctrain.errors import UserError

Recipe = dict[str, Any]
"""Values of JSON; one of the keys hdf5, arrays, parts, function says which kind it is."""


def describe(dataset: Dataset, arrays: dict[str, NDArray[Any]]) -> Recipe:
    """The recipe of a dataset. What it holds in memory is put into ``arrays``, and stands in the recipe by its key.

    Raises:
        UserError: it cannot be opened again elsewhere, being an object of the user's.
    """
    if isinstance(dataset, Hdf5Dataset):
        return {
            "hdf5": str(dataset.path),
            "fields": list(dataset.fields),
            "cache": dataset.cache.limit_bytes,
            "outside": dataset.outside,
        }
    if isinstance(dataset, ArrayDataset):
        keys = {name: f"{len(arrays) + index}" for index, name in enumerate(dataset.arrays)}
        arrays.update({keys[name]: array for name, array in dataset.arrays.items()})
        return {"arrays": keys}
    if isinstance(dataset, ConcatDataset):
        return {"parts": [describe(part, arrays) for part in dataset.parts]}
    if isinstance(dataset, CalledDataset):
        return {
            "function": refer(dataset.function, "the data"),
            "fields": dataset.names,
            "cache": dataset.cache_bytes,
            "outside": dataset.outside,
            "fingerprint": dataset.fingerprint(),
        }
    kind = type(getattr(dataset, "source", dataset)).__name__  # of a torch Dataset, not of what is around it
    raise refusal(f"the data is an object of {kind}, and no function is known that makes it")


def follow(recipe: Mapping[str, Any], arrays: Samples) -> Dataset:
    """The dataset of a recipe. Files share one cache, as they do where they were opened.

    Raises:
        UserError: a function gives other data here than where it was described.
    """
    return _follow(recipe, arrays, {})


def _follow(recipe: Mapping[str, Any], arrays: Samples, caches: dict[int, BlockCache]) -> Dataset:
    if "hdf5" in recipe:
        cache = caches.setdefault(recipe["cache"], BlockCache(recipe["cache"]))
        return open_hdf5(Path(recipe["hdf5"]), tuple(recipe["fields"]), cache, recipe["outside"])
    if "arrays" in recipe:
        return from_arrays({name: arrays[key] for name, key in recipe["arrays"].items()})
    if "parts" in recipe:
        return ConcatDataset([_follow(part, arrays, caches) for part in recipe["parts"]])
    dataset = open_dataset(resolve(recipe["function"]), recipe["fields"], recipe["cache"], recipe["outside"])
    if dataset.fingerprint() != recipe["fingerprint"]:
        raise UserError(
            "the data function gave a worker process other data than the rank",
            "make it depend on its arguments only: seed a Generator inside it",
        )
    return dataset

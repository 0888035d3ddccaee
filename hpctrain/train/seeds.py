"""Random states: the same on all ranks where ranks must agree, keyed by rank where they must differ."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from hpctrain.system.array_types import Array


def derive(seed: int, *keys: int) -> int:
    """A 63-bit seed (NumPy's SeedSequence): equal keys give equal seeds, different keys independent ones."""
    return int(np.random.SeedSequence([seed, *keys]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_python(seed: int) -> None:
    """Seeds Python's and NumPy's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


NONE = np.float64("nan")
"""Stands for a missing spare Gaussian deviate."""


def host_random_state() -> dict[str, Array]:
    """State of Python's and NumPy's global generators, as new arrays of fixed shapes, by name."""
    version, words, spare = random.getstate()
    legacy = np.random.get_state(legacy=False)
    return {
        "rng/python": np.array([version, *words], np.int64),
        "rng/python_spare": np.array([NONE if spare is None else spare], np.float64),
        "rng/numpy": np.append(legacy["state"]["key"].astype(np.int64), legacy["state"]["pos"]),
        "rng/numpy_spare": np.array([legacy["gauss"] if legacy["has_gauss"] else NONE], np.float64),
    }


def restore_host_random_state(arrays: Mapping[str, Array]) -> None:
    """Restores what ``host_random_state`` returned; a generator that is missing there is left alone."""
    if "rng/python" in arrays:
        version, *words = arrays["rng/python"].tolist()
        spare = float(arrays["rng/python_spare"][0])
        random.setstate((version, tuple(words), None if np.isnan(spare) else spare))
    if "rng/numpy" in arrays:
        spare = float(arrays["rng/numpy_spare"][0])
        has = not np.isnan(spare)
        key = arrays["rng/numpy"][:-1].astype(np.uint32)
        pos = int(arrays["rng/numpy"][-1])
        np.random.set_state(("MT19937", key, pos, int(has), spare if has else 0.0))

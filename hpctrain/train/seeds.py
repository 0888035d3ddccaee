"""Random states: the same on all ranks where ranks must agree, keyed by rank where they must differ."""

from __future__ import annotations

import random

import numpy as np


def derive(seed: int, *keys: int) -> int:
    """A 63-bit seed for a purpose: equal keys give equal seeds, different keys independent ones (NumPy's
    SeedSequence)."""
    return int(np.random.SeedSequence([seed, *keys]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_python(seed: int) -> None:
    """Seeds Python's and NumPy's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)

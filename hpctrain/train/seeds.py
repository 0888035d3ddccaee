"""Random states: the same on all ranks where ranks must agree, keyed by rank where they must differ."""

from __future__ import annotations

import random
import sys

import numpy as np


def derive(seed: int, *keys: int) -> int:
    """A 63-bit seed for a purpose: equal keys give equal seeds, different keys independent ones (NumPy's SeedSequence)."""
    return int(np.random.SeedSequence([seed, *keys]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_task(seed: int) -> None:
    """Seeds Python, NumPy and each framework that is imported, alike on all ranks, before the task is made."""
    seed_python(seed)
    if "torch" in sys.modules:
        from hpctrain.frameworks.torch import seed as seed_torch

        seed_torch(seed)
    if "tensorflow" in sys.modules:
        from hpctrain.frameworks.tensorflow import seed as seed_tensorflow

        seed_tensorflow(seed)


def seed_python(seed: int) -> None:
    """Seeds Python's and NumPy's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)

"""Random numbers that depend on what they are for, never on who draws them or when."""

from __future__ import annotations

import enum

import numpy as np
from numpy.random import Generator, Philox


class Stream(enum.IntEnum):
    """What random numbers are for: each purpose has its own stream of the same seed and epoch."""

    ORDER = 0
    """The order of samples, or of blocks, in an epoch."""
    WITHIN_GROUP = 1
    """The order of samples within one group of blocks."""
    TRANSFORM = 2
    """The random transform of one sample."""


def generator(seed: int, epoch: int, stream: Stream, index: int = 0) -> Generator:
    """A generator keyed by (seed, epoch, stream, index).

    Philox is counter-based (Salmon et al., SC 2011): seed and epoch are its 128-bit key, stream and index the upper
    half of its 256-bit counter, so that no two generators overlap within their first 2**128 numbers.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    counter = np.array([0, 0, index, stream], dtype=np.uint64)
    return Generator(Philox(key=key, counter=counter))

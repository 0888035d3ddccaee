"""A random permutation that takes no memory: any stretch of it is computed from its position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

ROUNDS = 8
"""Four are enough against an adversary who sees few pairs (Luby and Rackoff 1988); the rest is margin."""
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class FeistelPermutation:
    """A permutation of 0 to ``length - 1``, keyed by ``ROUNDS`` random words.

    A generalized Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a position
    is a pair (row, column) of a rectangle of at least ``length`` cells, and each round adds a hash of one to the other,
    modulo its size. What lands beyond ``length`` is permuted again until it does not.
    """

    length: int
    keys: NDArray[np.uint64]

    @classmethod
    def draw(cls, length: int, rng: Generator) -> FeistelPermutation:
        """One of the permutations of ``length`` things."""
        return cls(length, rng.integers(0, 2**64, ROUNDS, dtype=np.uint64))

    def __call__(self, begin: int, end: int) -> NDArray[np.int64]:
        """int64[end - begin]: what stands at positions ``begin`` to ``end - 1``."""
        found = self._once(np.arange(begin, end, dtype=np.uint64))
        while len(outside := np.flatnonzero(found >= self.length)):
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        columns = np.uint64(math.isqrt(self.length - 1) + 1)
        rows = np.uint64(-(-self.length // int(columns)))
        row, column = np.divmod(positions, columns)
        for even, odd in self.keys.reshape(-1, 2):
            row = (row + _hashed(column ^ even) % rows) % rows
            column = (column + _hashed(row ^ odd) % columns) % columns
        return row * columns + column


def _hashed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit depends on all bits."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))

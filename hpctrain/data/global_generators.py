"""Random numbers for streams that draw from global generators: equal on all ranks, and apart from the model's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpctrain.data.order import RandomStream, keyed_generator


def states() -> tuple[Any, ...]:
    """States of Python's, NumPy's and, if it is imported, torch's global generator on the CPU."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(legacy=False), torch and torch.default_generator.get_state()


def restore(kept: tuple[Any, ...]) -> None:
    """Restore what ``states`` returned."""
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    if kept[2] is not None:
        sys.modules["torch"].default_generator.set_state(kept[2])


def seed_all(seed: int) -> None:
    """Seed the generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the generators' states after the body."""
    before = states()
    try:
        yield
    finally:
        restore(before)


@contextlib.contextmanager
def seeded(generator: np.random.Generator) -> Iterator[None]:
    """Seed the generators for the body; restore their states after it."""
    with kept():
        seed_all(int(generator.integers(2**63)))
        yield


class GlobalGenerators:
    """Global generators as one stream sees them: ``used`` swaps its states in while the stream is read."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.next: tuple[int, int] | None = None
        self.own: tuple[Any, ...] | None = None

    def reseed(self, epoch: int, batch: int) -> None:
        """Key what is drawn from now on by seed, epoch and batch."""
        self.next = epoch, batch

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the stream's states in the body; call ``reseed`` before the first use."""
        before = states()
        if self.own is not None:
            restore(self.own)
        if self.next is not None:
            epoch, batch = self.next
            seed_all(int(keyed_generator(self.seed, epoch, RandomStream.DATASET, batch).integers(2**63)))
            self.next = None
        try:
            yield
        finally:
            self.own = states()
            restore(before)

"""A framework of a few lines of NumPy, of which a test defines the step: for tests of what happens around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from hpctrain.train.framework import Facts
from hpctrain.train.metrics import Meter
from hpctrain.train.state import StateTensor
from hpctrain.train.tree import Leaves


class FakeFramework:
    """One rank's framework without state and random numbers, on the host."""

    facts = Facts("numpy", Leaves(), 0, "none")
    meters: Mapping[str, Meter] = {}
    sync_group = None

    @property
    def host(self) -> Any:
        return self

    def set_learning_rate(self, factor: float) -> None: ...

    def state(self) -> Sequence[StateTensor]:
        return []

    def staging(self, num_bytes: int, given: np.ndarray | None = None) -> np.ndarray:
        return np.zeros(num_bytes, np.uint8) if given is None else given

    def synchronize(self) -> None: ...

    def reseed(self, step: int) -> None: ...

    def kept_random_state(self) -> AbstractContextManager[None]:
        return nullcontext()

    def merged_buffers(self, group: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...

"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, Mixed Precision Training, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.train.state import ArrayTensor

NAME = "scaler/scale"
"""Of the state in checkpoints."""
INITIAL = 2.0**16
GROWTH_STEPS = 2000
SMALLEST = 2.0**-10
"""Below this it is not the scale that makes gradients overflow."""


class LossScale:
    """Halved when a gradient overflows, doubled after many steps without. Equal on all ranks: so are the sums."""

    def __init__(self, name: str = NAME) -> None:
        """``name`` of its state: a task with several optimizers has a scale for each."""
        self.name = name
        self.state = np.array([INITIAL, 0.0], np.float64)
        """The scale, and the updates since it changed."""

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before backward."""
        return float(self.state[0])

    def succeeded(self) -> None:
        """An update was done."""
        self.state[1] += 1
        if self.state[1] >= GROWTH_STEPS:
            self.state[:] = self.state[0] * 2, 0

    def overflowed(self) -> bool:
        """An update is skipped; False if scaling cannot be the reason."""
        self.state[:] = self.state[0] / 2, 0
        return bool(self.state[0] >= SMALLEST)

    def tensors(self) -> list[ArrayTensor]:
        """Its state, for checkpoints."""
        return [ArrayTensor(self.name, self.state)]

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes over a saved state, if there is one."""
        if self.name in arrays:
            self.state[:] = arrays[self.name]


def loss_scale_of(optimizer: str) -> LossScale:
    """With a name of its own if the optimizer has one."""
    return LossScale(f"{NAME}/{optimizer}") if optimizer else LossScale()

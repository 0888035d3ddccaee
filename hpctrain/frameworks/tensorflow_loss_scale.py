"""Loss scaling for fp16: gradients too small for half precision are computed larger, and divided again in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST = 2.0**15
LEAST = 1.0
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles (Micikevicius et al. 2018, section 3.2)."""


@dataclass
class LossScale:
    """Halves at each overflow, doubles after a while without one. Equal on all ranks, as the summed gradients are."""

    value: float = FIRST
    good_steps: int = 0

    @property
    def is_least(self) -> bool:
        """Whether the scale cannot be the reason of an overflow."""
        return self.value <= LEAST

    def advance(self, finite: bool) -> None:
        """Takes note of a step's gradients."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, LEAST)
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0

    def to_array(self) -> NDArray[np.float64]:
        """float64[2]: scale and count, for a checkpoint."""
        return np.array([self.value, self.good_steps], np.float64)

    def restore(self, saved: NDArray[np.float64]) -> None:
        """Takes over what ``to_array`` gave."""
        self.value, self.good_steps = float(saved[0]), int(saved[1])

"""The few numbers that travel with the gradients, in the extra slots of the same message: they cost no latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 16
"""Extra slots: one cache line."""
LOSS, WEIGHT, WEIGHTED, SQUARE = 0, 1, 2, 3
"""Index of each number among the slots. SQUARE does not travel: sums that promise it fill in the square of the L2 norm
of the summed gradients."""


@dataclass(frozen=True)
class ExchangeResult:
    """What all ranks together know after an exchange.

    A mean loss contributes ``mean * local_samples / global_samples`` on each rank and its gradients likewise. A
    (sum, weight) loss contributes both divided by ``global_samples``, and gradients must be divided by ``divisor``
    after the exchange.
    """

    loss: float
    """Mean loss over the global batch."""
    divisor: float
    """What the summed gradients are to be divided by: 1 for mean losses and if all weights are zero."""


def read_slots(slots: Sequence[float]) -> ExchangeResult:
    """Reads the summed slots. A rank without samples leaves its slots at zero and learns the kind from the others."""
    if slots[WEIGHTED] and slots[WEIGHT]:
        return ExchangeResult(slots[LOSS] / slots[WEIGHT], slots[WEIGHT])
    return ExchangeResult(slots[LOSS], 1.0)

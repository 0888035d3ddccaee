"""The decision of UpdateRule, computed on the device: the optimizer is launched before the host has read the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.reduce.flat_layout import LOSS, SLOTS, WEIGHT, WEIGHTED


def decided(numbers: Tensor, scale: float, clip_norm: float | None) -> tuple[Tensor, Tensor]:
    """The factor for gradients, float64, and whether the update must be skipped, bool.

    The host does the same operations in float64, so the results are the same bits.

    Args:
        numbers: summed slots; the norm of the summed gradients follows if it is needed.
        scale: loss scale of these gradients.
        clip_norm: limit of the norm.
    """
    exact = numbers.double()
    weight = exact[WEIGHT]
    divisor = torch.where(exact[WEIGHTED] * weight != 0, weight, 1.0)
    flaw = exact[LOSS] / divisor * 0  # NaN if it is not finite
    divisor = divisor * scale
    factor = torch.ones_like(divisor)
    if len(numbers) > SLOTS:
        norm = exact[SLOTS] / divisor
        flaw = flaw + norm * 0
        if clip_norm is not None:
            factor = torch.where(norm > clip_norm, clip_norm / norm, factor)
    return factor / divisor, flaw != 0

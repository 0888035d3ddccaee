"""What an update does with the summed gradients: scale, clip, or skip them, with dynamic loss scaling for fp16
(Micikevicius et al. 2018, Mixed Precision Training, section 3.2); and the result of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.config.sections import TrainConfig
from hpctrain.reduce.flat_layout import LOSS, WEIGHT, WEIGHTED, ExchangeResult
from hpctrain.train.framework import GRADIENT, NonFiniteLoss, Sums
from hpctrain.train.state import ArrayTensor

NAME = "scaler/scale"
"""Name of the state in checkpoints."""
INITIAL = 2.0**16
GROWTH_STEPS = 2000
SMALLEST = 2.0**-10
"""Below this, the scale cannot be the reason that gradients overflow."""


class LossScale:
    """A dynamic loss scale: halved on overflow, doubled after many updates without one. Equal on all ranks, as the
    summed gradients are."""

    def __init__(self, optimizer: str = "") -> None:
        """``optimizer``: the optimizer's name if a task has several; each has its own scale."""
        self.name = f"{NAME}/{optimizer}" if optimizer else NAME
        self.state = np.array([INITIAL, 0.0], np.float64)
        """The scale, and the number of updates since it last changed."""

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before backward."""
        return float(self.state[0])

    def succeeded(self) -> None:
        """Counts a successful update."""
        self.state[1] += 1
        if self.state[1] >= GROWTH_STEPS:
            self.state[:] = self.state[0] * 2, 0

    def overflowed(self) -> bool:
        """Lowers the scale for a skipped update; returns False if the scale cannot be the reason."""
        self.state[:] = self.state[0] / 2, 0
        return bool(self.state[0] >= SMALLEST)

    def tensors(self) -> list[ArrayTensor]:
        """The state, for checkpoints."""
        return [ArrayTensor(self.name, self.state)]

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restores a saved state, if there is one."""
        if self.name in arrays:
            self.state[:] = arrays[self.name]


LOSS_OR_GRADIENT = "the loss or its gradient"
"""What is not finite if both were computed at once."""


class NotFinite(Exception):
    """The loss, or else a gradient, is not finite, and the loss scale is not the reason."""

    def __init__(self, of_loss: bool = True) -> None:
        self.of_loss = of_loss


@dataclass(frozen=True)
class Decision:
    """How an update continues after the exchange."""

    factor: float | None
    """Factor for the summed gradients; None to skip the update."""
    norm: float | None
    """L2 norm of the averaged gradient before clipping, if known."""


@dataclass(frozen=True)
class UpdateRule:
    """Decides from values that are equal on all ranks, so that all ranks decide the same."""

    clip_norm: float | None
    loss_scale: LossScale | None

    @property
    def needs_norm(self) -> bool:
        """Whether the gradient norm is needed, for clipping or for loss scaling."""
        return self.clip_norm is not None or self.loss_scale is not None

    @property
    def scale(self) -> float:
        """Factor for losses before backward, and so for gradients."""
        return self.loss_scale.factor if self.loss_scale else 1.0

    def decide(self, result: ExchangeResult, norm_of_sums: float | None) -> Decision:
        """Decides how the update continues, and updates the loss scale.

        Args:
            result: result of the exchange.
            norm_of_sums: L2 norm of the summed gradients; may be None if ``needs_norm`` is False.

        Raises:
            NotFinite: loss or gradient is not finite; raised on all ranks.
        """
        divisor = result.divisor * self.scale
        norm = None if norm_of_sums is None else norm_of_sums / divisor
        if math.isfinite(result.loss) and (norm is None or math.isfinite(norm)):
            if self.loss_scale:
                self.loss_scale.succeeded()
            return Decision(clip_factor(norm, self.clip_norm) / divisor, norm)
        if self.loss_scale and self.loss_scale.overflowed():
            return Decision(None, None)
        raise NotFinite(not math.isfinite(result.loss))


def rule_of(train: TrainConfig, optimizer: str = "") -> UpdateRule:
    """The update rule of the run file, for the named optimizer if there are several."""
    return UpdateRule(train.clip_norm, LossScale(optimizer) if train.precision == "fp16" else None)


def decided(
    slots: Any,
    norm: Any,
    scale: Any,
    clip_norm: float | None,
    where: Callable[[Any, Any, float], Any],
    is_finite: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """What ``UpdateRule.decide`` decides, computed by a framework where its tensors are: the factor for gradients, and
    whether they are sound.

    The operations are those of the host, in float64, so the results are the same bits.

    Args:
        slots: summed slots, float64.
        norm: L2 norm of the summed gradients, float64; None if it is not needed.
        scale: loss scale of these gradients.
        clip_norm: limit of the norm.
        where, is_finite: functions of the framework.
    """
    weight = slots[WEIGHT]
    divisor = where((slots[WEIGHTED] != 0) & (weight != 0), weight, 1.0)
    sound, divisor, clip = is_finite(slots[LOSS] / divisor), divisor * scale, 1.0
    if norm is not None:
        norm = norm / divisor
        sound = sound & is_finite(norm)
        if clip_norm is not None:
            clip = where(norm > clip_norm, clip_norm / norm, 1.0)
    return clip / divisor, sound


def clip_factor(norm: float | None, limit: float | None) -> float:
    """Factor that limits a gradient with this norm to the given norm."""
    return limit / norm if limit is not None and norm is not None and norm > limit else 1.0


def ranks_at_fault(error: NotFinite, group: Group, own_finite: bool, what: str = "the loss") -> NonFiniteLoss:
    """The error that says on which ranks the loss or gradient is not finite, and which loss it is. Collective."""
    if not error.of_loss:  # equal on all ranks, and only the sum of the gradients is left
        return NonFiniteLoss([], GRADIENT)
    everywhere = group.allgather(own_finite, "find the rank whose loss is not finite")
    return NonFiniteLoss([rank for rank, finite in enumerate(everywhere) if not finite], what)


@dataclass(frozen=True)
class UpdateResult:
    """Result of one update; see StepResult."""

    values: Mapping[str, tuple[Any, Any]]
    """This rank's (sum, weight) by name; numbers, or scalars that may be on a device still."""

    @classmethod
    def of(cls, loss: tuple[float, float], grad_norm: float | None, more: Mapping[str, tuple[Any, Any]]) -> Self:
        """The result of an update of a task with a loss.

        Args:
            loss: this rank's (sum, weight).
            grad_norm: global L2 norm of the averaged gradient before clipping, if it was computed.
            more: the metrics of ``train.metrics``.
        """
        return cls({**more, "loss": loss, **({} if grad_norm is None else {"grad_norm": (grad_norm, 1.0)})})

    def sums(self) -> Sums:
        return {name: (float(total), float(weight)) for name, (total, weight) in self.values.items()}

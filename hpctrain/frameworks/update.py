"""What an update does with the summed gradients: divide, clip, or leave it out; and what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.comm.group import Group
from hpctrain.frameworks.loss_scale import LossScale
from hpctrain.reduce.exchange_slots import ExchangeResult
from hpctrain.train.framework import NonFiniteLoss, Sums


class NotFinite(Exception):
    """Loss or gradient is not finite, and it is not the loss scale that is at fault."""


@dataclass(frozen=True)
class Decision:
    """What comes next in an update."""

    factor: float | None
    """What the summed gradients are to be multiplied by; None: the update is left out."""
    norm: float | None
    """L2 norm of the averaged gradient before clipping, if it is known."""


@dataclass(frozen=True)
class UpdateRule:
    """Decides by what is equal on all ranks, so that all decide the same."""

    clip_norm: float | None
    loss_scale: LossScale | None

    @property
    def needs_norm(self) -> bool:
        """Whether it has to know the norm; without, it divides by weights only."""
        return self.clip_norm is not None or self.loss_scale is not None

    @property
    def scale(self) -> float:
        """What losses are multiplied by before backward, and so the gradients."""
        return self.loss_scale.factor if self.loss_scale else 1.0

    def decide(self, result: ExchangeResult, norm_of_sums: float | None) -> Decision:
        """Tells the loss scale how the update went.

        Args:
            result: of the exchange.
            norm_of_sums: L2 norm of the summed gradients; may be left out if ``needs_norm`` is False.

        Raises:
            NotFinite: on all ranks.
        """
        divisor = result.divisor * self.scale
        norm = None if norm_of_sums is None else norm_of_sums / divisor
        if math.isfinite(result.loss) and (norm is None or math.isfinite(norm)):
            if self.loss_scale:
                self.loss_scale.succeeded()
            return Decision(clip_factor(norm, self.clip_norm) / divisor, norm)
        if self.loss_scale and self.loss_scale.overflowed():
            return Decision(None, None)
        raise NotFinite


def clip_factor(norm: float | None, limit: float | None) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is at most the limit."""
    return limit / norm if limit is not None and norm is not None and norm > limit else 1.0


def ranks_at_fault(group: Group, own_finite: bool, what: str = "the loss") -> NonFiniteLoss:
    """Says on which ranks the loss or the gradient is not finite, and which loss. Collective."""
    everywhere = group.allgather(own_finite, "find the rank whose loss is not finite")
    return NonFiniteLoss([rank for rank, finite in enumerate(everywhere) if not finite], what)


@dataclass(frozen=True)
class UpdateResult:
    """What one update gave; see StepResult."""

    loss: tuple[float, float]
    """This rank's (sum, weight)."""
    grad_norm: float | None
    """Global L2 norm of the averaged gradient before clipping, if it was computed."""

    def sums(self) -> Sums:
        known = {} if self.grad_norm is None else {"grad_norm": (self.grad_norm, 1.0)}
        return {"loss": self.loss, **known}

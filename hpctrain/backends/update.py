"""What an update does with the summed gradients: divide, clip, or leave it out, with a dynamic loss scale for fp16
(Micikevicius et al. 2018, Mixed Precision Training, section 3.2); and what it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.config.sections import TrainConfig
from hpctrain.reduce.int8_sum import Residue
from hpctrain.reduce.layout import ExchangeResult
from hpctrain.train.framework import NonFiniteLoss, Sums
from hpctrain.train.state import ArrayTensor, Placement

NAME = "scaler/scale"
"""Of the state in checkpoints."""
INITIAL = 2.0**16
GROWTH_STEPS = 2000
SMALLEST = 2.0**-10
"""Below this it is not the scale that makes gradients overflow."""


class LossScale:
    """Halved when a gradient overflows, doubled after many steps without. Equal on all ranks: so are the sums."""

    def __init__(self, optimizer: str = "") -> None:
        """``optimizer``: its name, if a task has several: each has a scale."""
        self.name = f"{NAME}/{optimizer}" if optimizer else NAME
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
    """Decides by values that are equal on all ranks, so that all decide the same."""

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


def rule_of(train: TrainConfig, optimizer: str = "") -> UpdateRule:
    """As the run file says; with the optimizer's name, if it has one."""
    return UpdateRule(train.clip_norm, LossScale(optimizer) if train.precision == "fp16" else None)


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
    more: Sums = field(default_factory=dict)
    """What a step of the task's own returned besides: this rank's (sum, weight) by name."""

    def sums(self) -> Sums:
        known = {} if self.grad_norm is None else {"grad_norm": (self.grad_norm, 1.0)}
        return {**self.more, "loss": self.loss, **known}


def residue_tensors(residues: Mapping[str, Residue]) -> list[ArrayTensor]:
    """``reduce/error`` and what it takes to load it on other ranks, by optimizer."""
    found: list[ArrayTensor] = []
    for optimizer, residue in residues.items():
        error, updates, sharers = names(optimizer)
        found.append(ArrayTensor(error, residue.error, Placement.RANK))
        found += [ArrayTensor(updates, residue.updates), ArrayTensor(sharers, residue.sharers)]
    return found


def load_residues(residues: Mapping[str, Residue], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Takes over what ``residue_tensors`` gave. One rank has none to save: then there is no error."""
    for optimizer, residue in residues.items():
        if names(optimizer)[0] in arrays:
            residue.load(*(arrays[name] for name in names(optimizer)))


def names(optimizer: str) -> list[str]:
    """Of the tensors of one optimizer's gradients."""
    return [f"reduce/{what}{'/' if optimizer else ''}{optimizer}" for what in ("error", "updates", "sharers")]

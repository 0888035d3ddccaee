"""Metrics with the interface of torchmetrics (states and reductions), which tests do not install."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def dim_zero_sum(values: Tensor) -> Tensor:
    return values.sum(0)


def dim_zero_mean(values: Tensor) -> Tensor:
    return values.mean(0)


def dim_zero_cat(values: Any) -> Tensor:
    return torch.cat(list(values)) if isinstance(values, (list, tuple)) else values


class StandIn(nn.Module):
    """Like ``torchmetrics.Metric`` 1.9: states are attributes, and ``load_state_dict`` sets those it is given."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults: dict[str, Any] = {}
        self._reductions: dict[str, Any] = {}

    def add_state(self, name: str, default: Any, reduction: Callable[..., Any] | None) -> None:
        self._defaults[name], self._reductions[name] = default, reduction
        self.reset()

    @property
    def metric_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._defaults}

    def reset(self) -> None:
        for name, default in self._defaults.items():
            if isinstance(default, list):
                getattr(self, name, []).clear()
                setattr(self, name, [])
            else:
                setattr(self, name, default.clone())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name in self._defaults:
            if prefix + name in state:
                setattr(self, name, state.pop(prefix + name))
        super()._load_from_state_dict(state, prefix, *arguments)


class Hits(StandIn):
    """Accuracy, computed from sums."""

    hits: Tensor
    total: Tensor

    def __init__(self, reduction: Any = dim_zero_sum, begin: int = 0) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(begin), reduction)
        self.add_state("total", torch.tensor(0), reduction)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.hits = self.hits + (outputs.argmax(1) == targets).sum()
        self.total = self.total + len(targets)

    def compute(self) -> Mapping[str, Tensor]:
        return {"share": self.hits / self.total}


class Median(StandIn):
    """Median of all outputs, which needs every sample."""

    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dim_zero_cat)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append(outputs.flatten())

    def compute(self) -> Tensor:
        return dim_zero_cat(self.seen).median()

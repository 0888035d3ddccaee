"""Metrics of single batches, in evaluations and in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.reduce.slots import Number
from hpctrain.backends.torch.torch_metrics import to_host
from hpctrain.train.framework import HostBatch, samples_of
from hpctrain.train.metrics import Meter, Seen

Scores = dict[str, tuple[Number, Number]]
"""(sum, weight) by name; tensors of float64 where the scores are, which are only read when they are reported."""


@dataclass(frozen=True)
class BatchMetrics:
    """What is computed of the model's outputs for a batch."""

    compute: Compute
    """Precision of the functions."""
    functions: Mapping[str, Callable[[Any, Any], Any]]
    """function(outputs, batch) gives a mean over samples, or (sum, weight)."""
    meters: Mapping[Any, Meter]
    """Metrics that keep state."""
    counts: bool = True
    """Whether this rank's samples count in metrics that keep state: in a tensor group, those of one rank do."""

    def scores(self, outputs: Any, batch: Mapping[str, Any], host: HostBatch) -> Scores:
        """What the functions give for a batch, without gradients; updates the metrics that keep state. ``host`` is the
        batch in NumPy."""
        with torch.no_grad():
            with self.compute.autocast():
                found = {name: function(outputs, batch) for name, function in self.functions.items()}
            seen = Seen(outputs, batch, host, to_host)
            with self.compute.autocast(enabled=False):  # which a pipeline's forward pass may have begun
                for meter in self.meters.values() if self.counts else ():
                    meter.update(seen)
        return {name: sum_and_weight(score, samples_of(host)) for name, score in found.items()}


def sum_and_weight(score: Any, samples: int) -> tuple[Number, Number]:
    """(sum, weight) of a score that is a mean over the samples or already (sum, weight)."""
    if isinstance(score, tuple):
        return exact(score[0]), exact(score[1])
    return exact(score) * samples, float(samples)


def exact(value: Any) -> Number:
    """A number without its autograd graph, in 64 bits."""
    return value.detach().double() if isinstance(value, torch.Tensor) else float(value)

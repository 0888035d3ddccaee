"""The starting point of a strategy's memory estimate: a model that was trained for one step without the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from hpctrain.backends.torch.framework import TorchFramework
from hpctrain.backends.torch.metrics import of_torchmetrics
from hpctrain.backends.torch.strategies.parameter_traits import ParameterTraits, try_optimizers, unsuited
from hpctrain.backends.torch.task.checks import model_features
from hpctrain.backends.torch.task.shares import Share, shares_of
from hpctrain.config.combinations import Feature, Uses, refuse, used
from hpctrain.parallel.memory_estimate import MemoryEstimate, TensorSize


@dataclass(frozen=True)
class Estimated:
    """A model, and a plan of a run with it."""

    framework: TorchFramework
    """A closed framework, with the model and whole optimizers that have made no step."""
    state: Sequence[TensorSize]
    """Sizes of the state after one step."""
    whole: MemoryEstimate
    """Estimate without the strategy."""
    features: Mapping[Feature, Any]
    """Features of the run file with this plan."""
    data: int
    """Number of data-parallel ranks."""
    pipeline: int
    """Number of pipeline stages."""
    micro_batches: int
    """Micro-batches per update."""
    is_asked: bool
    """Whether the run file asks for the strategy."""

    @property
    def shares(self) -> Mapping[str, Share]:
        """Parameters by optimizer."""
        framework = self.framework
        return shares_of(framework.task, framework.model, framework.source.optimizer_state.every)

    @cached_property
    def traits(self) -> ParameterTraits:
        """How optimizers may be partitioned. Raises UserError, with the reason, if the model cannot be."""
        self.refuse({})
        framework = self.framework
        traits = try_optimizers(framework.source.optimizer_state.every, framework.device)
        self.refuse({Feature.NON_ELEMENTWISE: traits.coupled})
        return traits

    def refuse(self, found: Uses) -> None:
        """Raises Refused if the plan does not work with the model, its optimizers, or the given features."""
        framework, task = self.framework, self.framework.task
        parts = framework.source.optimizer_state.every
        unfit = unsuited(parts, framework.source.holdings)
        of_task = {Feature.TORCH_METRICS: of_torchmetrics(task), Feature.OWN_STEP: task.step is not None}
        of_model = model_features(framework.model, parts, False, self.data, unfit)
        refuse({**self.features, **of_model, **used({**of_task, **found})})


Estimate: TypeAlias = Callable[[Estimated], MemoryEstimate | None]
"""Estimates the rank with the most memory; returns None if there is nothing to partition. Raises UserError, with the
reason, if the model cannot be partitioned."""

"""What an estimate of a strategy begins with: a model that was trained for one step as a rank has it whole."""

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
    """Has the model with whole optimizers, which have made no step. It is closed."""
    state: Sequence[TensorSize]
    """After a step."""
    whole: MemoryEstimate
    """What a rank has without the strategy."""
    features: Mapping[Feature, Any]
    """Of the run file with this plan."""
    data: int
    """Ranks with different samples."""
    pipeline: int
    """Stages."""
    micro_batches: int
    """Of an update."""
    is_asked: bool
    """Whether the run file asks for the strategy."""

    @property
    def shares(self) -> Mapping[str, Share]:
        """Parameters by optimizer."""
        framework = self.framework
        return shares_of(framework.task, framework.model, framework.source.optimizer_state.every)

    @cached_property
    def traits(self) -> ParameterTraits:
        """How optimizers may be partitioned. Raises UserError if the model cannot be; says why."""
        self.refuse({})
        framework = self.framework
        traits = try_optimizers(framework.source.optimizer_state.every, framework.device)
        self.refuse({Feature.NON_ELEMENTWISE: traits.coupled})
        return traits

    def refuse(self, found: Uses) -> None:
        """Raises Refused if the plan does not work with the model and its optimizers, or with what was found."""
        framework, task = self.framework, self.framework.task
        parts = framework.source.optimizer_state.every
        unfit = unsuited(parts, framework.source.holdings)
        of_task = {Feature.TORCH_METRICS: of_torchmetrics(task), Feature.OWN_STEP: task.step is not None}
        of_model = model_features(framework.model, parts, False, self.data, unfit)
        refuse({**self.features, **of_model, **used({**of_task, **found})})


Estimate: TypeAlias = Callable[[Estimated], MemoryEstimate | None]
"""What is left to the rank with most; None if there is nothing to partition. Raises UserError if the model cannot be
partitioned; says why."""

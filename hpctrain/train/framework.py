"""What the loop needs of PyTorch or TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from hpctrain.train.state import StateTensor

HostBatch = Mapping[str, NDArray[Any]]
"""A rank's part of a global batch: arrays with a leading sample axis."""


class StepResult(Protocol):
    """What one update gave. Values may still be on a device: reading them waits for it."""

    def sums(self) -> dict[str, tuple[float, float]]:
        """This rank's (sum, weight) of ``loss`` and, where known, ``grad_norm`` (weight 1)."""


class Framework(Protocol):
    """One model on this rank's device."""

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        """Forward, backward, exchange, update, over this rank's part of a global batch of ``global_samples`` samples.

        Raises NonFiniteLoss (on every rank alike) where the averaged loss or gradient is not finite and no loss
        scaling is there to skip the step.
        """

    def evaluate(self, batch: HostBatch) -> dict[str, tuple[float, float]]:
        """This rank's (sum, weight) of the loss and of each metric, without training."""

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        """Outputs, sample axis first; a model with one output names it ``output``."""

    def state(self) -> Sequence[StateTensor]:
        """All tensors that make the model, optimizer, EMA, loss scale and random states, in a fixed order."""

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes over values by the names that ``state`` gives; raises UserError naming what is missing or of another shape."""

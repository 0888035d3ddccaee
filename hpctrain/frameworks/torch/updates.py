"""One update of an optimizer: backward passes over a global batch, the exchange of their gradients, the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import RunFailed
from hpctrain.frameworks.torch.checks import require_scalar
from hpctrain.frameworks.update import Decision, UpdateRule
from hpctrain.parallel.torch_exchange import Waiting
from hpctrain.parallel.torch_fully_sharded import FullyShardedReducers
from hpctrain.parallel.torch_sharded import ShardedReducers
from hpctrain.parallel.torch_stage import norm_over
from hpctrain.parallel.torch_tensor import TensorParallel
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.exchange_slots import ExchangeResult
from hpctrain.reduce.torch_reducer import Number, Reducer, TorchReducers
from hpctrain.tasks.blame import advised, own_line, words
from hpctrain.train.clock import Neighbours, Phase, StepClock

HALVES = (torch.bfloat16, torch.float16)


class Passes:
    """The backward passes of one update, on this rank.

    Args:
        reducer: of the optimizer's parameters; it forgets earlier gradients.
        scale: what losses are multiplied by, beside their share of the global batch.
        global_samples: in all ranks' parts together.
    """

    def __init__(self, reducer: Reducer, scale: float, global_samples: int) -> None:
        reducer.begin()
        self.reducer = reducer
        self.scale = scale
        self.global_samples = global_samples
        self.loss: Number = 0.0
        self.weight: Number = 0.0
        self.weighted = False

    def add(
        self, score: Any, samples: int, backward: Callable[[Tensor], object] = Tensor.backward, is_own: bool = True
    ) -> None:
        """One pass.

        Args:
            score: the mean over samples, or (sum, weight).
            samples: that it is the mean of.
            backward: runs it.
            is_own: whether the samples count; False for those of another rank, which meets this one in its passes.
        """
        self.weighted = isinstance(score, tuple)
        total, part = score if self.weighted else (score, samples)
        require_scalar(total)
        if total.dtype in HALVES:
            total = total.float()  # sums over samples, and the loss scale, do not fit into 16 bits
        times = (1 if self.weighted else samples) * is_own
        factor = self.scale * times / self.global_samples
        with differentiated():
            backward(total if factor == 1 else total * factor)
        self.loss = self.loss + number(total) * times
        self.weight = self.weight + (number(part) if isinstance(part, Tensor) else part) * is_own

    def told(self) -> NDArray[np.float64]:
        """What ``take`` takes over."""
        return np.array([float(self.loss), float(self.weight), self.weighted])

    def take(self, told: NDArray[np.float64]) -> None:
        """The loss is that of a rank which has seen the same samples."""
        self.loss, self.weight, self.weighted = float(told[0]), float(told[1]), bool(told[2])

    def exchange(self) -> ExchangeResult:
        """Makes the gradients those of all ranks."""
        weight = self.weight / self.global_samples if self.weighted else None
        return self.reducer.exchange(self.loss / self.global_samples, weight)


@contextmanager
def differentiated() -> Iterator[None]:
    """An error of autograd becomes a sentence: where it arises, nothing of the task is on the stack."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # a device's memory, another rank
            raise
        said = words(error)
        fix = (
            "see the operations in loss and forward; torch.autograd.set_detect_anomaly(True) in the task's file has "
            "the rank's log show the line of the one that fails"
        )
        raise RunFailed(f"the loss has no gradient: {said}{own_line(error)}", advised(fix, said)) from error


@dataclass(frozen=True)
class Trained:
    """An optimizer, and what it updates."""

    name: str
    """Of the optimizer, in the task; ``ONLY`` if it has no name."""
    optimizer: Any
    parameters: list[Tensor]
    """Whose gradients are exchanged for it."""
    average: list[Tensor]
    """Moving averages of the parameters, or none."""
    average_weight: float
    """Of the new values in the averages."""
    rule: UpdateRule
    tensor: TensorParallel
    stages: Group
    """Ranks that have other layers of the model."""

    def update(self, reducer: Reducer, totals: ExchangeResult, clock: StepClock) -> Decision:
        """Divides by weights and loss scale, clips, and steps, unless the update is left out.

        Raises:
            NotFinite: loss or gradient is not finite; on all ranks.
        """
        norm = self._norm(reducer, clock) if self.rule.needs_norm else None
        decision = self.rule.decide(totals, norm)
        if decision.factor is None:
            return decision
        if decision.factor != 1:
            torch._foreach_mul_(reducer.gradients(), decision.factor)
        self.optimizer.step()
        clock.mark(Phase.OPTIMIZER)
        if reducer.spread():
            clock.mark(Phase.EXCHANGE)
        if self.average:
            with torch.no_grad():
                torch._foreach_lerp_(self.average, self.parameters, self.average_weight)
        return decision

    def _norm(self, reducer: Reducer, clock: StepClock) -> float:
        """L2 norm of all gradients, wherever they are."""
        norm = self.tensor.norm(reducer.summed()) if self.tensor.slices else reducer.norm()
        if self.stages.size == 1:
            return norm
        with Waiting(clock, Neighbours.PIPELINE):
            return norm_over(self.stages, norm)


@dataclass(frozen=True)
class Exchanges:
    """A reducer for each optimizer, all of one kind."""

    of: Mapping[str, Reducer]

    @property
    def name(self) -> str:
        """Of the candidate, such as mpi-node."""
        return next(iter(self.of.values())).name

    def close(self) -> None:
        """See Reducer."""
        for reducer in self.of.values():
            reducer.close()


@dataclass(frozen=True)
class ExchangesToChoose:
    """Reducers of several optimizers, chosen together; see reducer_choice.Reducers."""

    of: Mapping[str, TorchReducers | ShardedReducers | FullyShardedReducers]

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        return next(iter(self.of.values())).possible(config, world)

    def open(self, candidate: Candidate, group: Group) -> Exchanges:
        return Exchanges({name: reducers.open(candidate, group) for name, reducers in self.of.items()})


def number(scalar: Tensor) -> Number:
    """A float; of a GPU's, for which that would have to wait, a tensor."""
    return scalar.item() if scalar.device.type == "cpu" else scalar.detach()

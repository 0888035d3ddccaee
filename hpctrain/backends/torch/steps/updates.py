"""One optimizer's update: backward passes over a global batch, the exchange of gradients, the optimizer step."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.reduce.slots import Number
from hpctrain.backends.torch.reduce.torch_reducers import TorchReducerFactory
from hpctrain.backends.torch.steps.batch_metrics import BatchMetrics, Scores
from hpctrain.backends.torch.strategies.parameter_traits import ELEMENTWISE
from hpctrain.backends.torch.strategies.tp_group import HALVES
from hpctrain.backends.torch.task.checks import SCALAR, has_hooks
from hpctrain.backends.update import Decision, NotFinite, UpdateRule, decided
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig, TrainConfig
from hpctrain.errors import RunFailed, UserError
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import SLOTS, ExchangeResult
from hpctrain.system.array_types import Floats
from hpctrain.system.user_errors import advice_on, advised, own_line, words
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.evaluation import add
from hpctrain.train.framework import HostBatch


class GradientAccumulation:
    """The backward passes of one update on this rank.

    Args:
        reducer: reducer of the optimizer's parameters; its earlier gradients are dropped.
        scale: factor for losses, besides their share of the global batch.
        global_samples: samples of all ranks together.
        metrics: computed of each batch.
    """

    def __init__(
        self, reducer: Reducer, scale: float, global_samples: int, metrics: BatchMetrics | None = None
    ) -> None:
        reducer.begin()
        self.reducer = reducer
        self.scale = scale
        self.global_samples = global_samples
        self.loss: Number = 0.0
        self.weight: Number = 0.0
        self.weighted = False
        self.metrics = metrics
        self.scores: Scores = dict.fromkeys(metrics.functions if metrics else (), (0.0, 0.0))

    def see(self, outputs: Any, batch: Mapping[str, Tensor], host: HostBatch) -> None:
        """Computes the metrics of a batch of this rank's own."""
        if self.metrics is not None:
            add(self.scores, self.metrics.scores(outputs, batch, host))

    def add(
        self, score: Any, samples: int, backward: Callable[[Tensor], object] = Tensor.backward, is_own: bool = True
    ) -> None:
        """Adds one pass.

        Args:
            score: the mean over samples, or (sum, weight).
            samples: number of samples that a mean is over.
            backward: runs the backward pass.
            is_own: False for another rank's batch, which is passed only because passes are collective.
        """
        self.weighted = isinstance(score, tuple)
        total, part = score if self.weighted else (score, samples)
        if total.numel() != 1:
            raise UserError(f"the loss has shape {list(total.shape)}", SCALAR)
        if total.dtype in HALVES:
            total = total.float()  # 16 bits cannot hold sums over samples or the loss scale
        times = (1 if self.weighted else samples) * is_own
        factor = self.scale * times / self.global_samples
        self.loss = self.loss + number(total) * times
        self.weight = self.weight + (number(part) if isinstance(part, Tensor) else part) * is_own
        self.reducer.before_backward(self.totals)
        with differentiated():
            backward(total if factor == 1 else total * factor)

    def as_array(self) -> Floats:
        """Loss, weight and scores so far, for ``take`` on another rank."""
        return np.array(list(map(float, [self.loss, self.weight, self.weighted, *chain(*self.scores.values())])))

    def take(self, values: Floats) -> None:
        """Replaces these by those of a rank that has seen the same samples."""
        self.loss, self.weight, weighted, *scores = values.tolist()
        self.weighted = bool(weighted)
        self.scores = dict(zip(self.scores, zip(scores[::2], scores[1::2], strict=True), strict=True))

    def exchange(self) -> tuple[ExchangeResult, tuple[float, float]]:
        """Sums the gradients over all ranks; returns the totals, and this rank's loss and weight.

        These are copied ahead of the totals, so reading them does not wait for a GPU once more.
        """
        loss, weight = copied_ahead(self.loss), copied_ahead(self.weight)
        totals = self.reducer.exchange(*self.totals())
        return totals, (float(loss), float(weight))

    def totals(self) -> tuple[Number, Number | None]:
        """Loss and weight to send with the gradients."""
        return self.loss / self.global_samples, self.weight / self.global_samples if self.weighted else None


@contextmanager
def differentiated() -> Iterator[None]:
    """Explains errors of autograd, which arise where no line of the task is on the stack."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # subclasses: out of device memory, failures of other ranks
            raise
        text = words(error)
        fix = (
            "look at the operations in loss and forward; with torch.autograd.set_detect_anomaly(True) in the task's "
            "file, the rank's log shows the line that fails"
        )
        kind = UserError if advice_on(text) else RunFailed
        raise kind(f"the backward pass fails: {text}{own_line(error)}", advised(fix, text)) from error


@dataclass(frozen=True)
class OptimizerStep:
    """An optimizer and the parameters it updates."""

    optimizer: Any
    parameters: list[Tensor]
    """Parameters whose gradients are exchanged for it."""
    average: list[Tensor]
    """Moving averages of the parameters; empty if there are none."""
    train: TrainConfig
    """The run file's settings for updates."""
    rule: UpdateRule
    total_norm: Callable[[Reducer], float]
    """L2 norm of the gradients of the whole model, on all ranks. Collective."""
    complete: Callable[[Reducer], object] = id
    """See strategies.strategy.PreparedModel."""
    steps_ahead: bool = False
    """Whether steps are launched before the host has read the loss, for which it would wait; not on CPUs."""

    @property
    def _is_watched(self) -> bool:
        """Whether a hook or replaced method on this rank sees each step, and so needs all gradients at once; not those
        of PyTorch's schedulers, which only count."""
        step = vars(self.optimizer).get("step")
        counts = hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(self.optimizer).step
        return (step is not None and not counts) or has_hooks(self.optimizer)

    @property
    def can_step_ahead(self) -> bool:
        """Whether ``step_ahead`` is possible; results are the same bits, so ranks may differ."""
        optimizer = self.optimizer
        return (
            self._may_step_ahead
            and not self._is_watched
            # SGD's first step of a parameter, if skipped, leaves uninitialised momentum behind
            and (
                all(one in optimizer.state for one in self.parameters if one.requires_grad)
                or not any(group.get("momentum") for group in optimizer.param_groups)
            )
        )

    @functools.cached_property
    def _may_step_ahead(self) -> bool:
        skips = type(self.optimizer) in ELEMENTWISE and getattr(self.optimizer, "_step_supports_amp_scaling", False)
        # Factors are rounded to the dtype of gradients, on the host to float32 at least.
        one_dtype = {one.dtype for one in self.parameters} in ({torch.float32}, {torch.float64})
        return self.steps_ahead and skips and one_dtype

    def begin_ahead(self, reducer: Reducer, clock: StepClock, weighted: bool) -> bool:
        """Has the reducer's next exchange launch ``step_ahead``, if both can do so; returns whether it will."""
        launch = functools.partial(self.step_ahead, reducer, clock, weighted)
        return self.can_step_ahead and reducer.before_reading(launch)

    def step_ahead(self, reducer: Reducer, clock: StepClock, weighted: bool, numbers: Tensor) -> None:
        """Launches the optimizer's step; the device skips it if loss or norm are not finite (``found_inf``).

        Args:
            reducer: its exchange has been launched.
            clock: marks the end of the exchange on the device.
            weighted: whether gradients must be divided by a weight.
            numbers: summed slots; the norm of the summed gradients follows if it is needed.
        """
        clock.mark_ahead(Phase.EXCHANGE)
        exact = numbers.double()
        norm = exact[SLOTS] if len(exact) > SLOTS else None
        factor, sound = decided(exact, norm, self.rule.scale, self.rule.clip_norm, torch.where, torch.isfinite)
        gradients = reducer.gradients()
        if gradients and (weighted or self.rule.needs_norm):
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        self.optimizer.found_inf = (~sound).float()
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf

    def update(self, reducer: Reducer, totals: ExchangeResult, clock: StepClock, has_stepped: bool = False) -> Decision:
        """Divides gradients by weights and loss scale, clips, and steps, unless the update is skipped.

        Every update of every program and strategy goes through here: anything that changes gradients belongs here.
        ``reducer.gradients()`` holds the gradients of everything this rank updates. ``has_stepped``: by ``step_ahead``.

        Raises:
            NotFinite: loss or gradient is not finite; raised on all ranks.
        """
        try:
            self.complete(reducer)
            norm = self.total_norm(reducer) if self.rule.needs_norm else None
            decision = self.rule.decide(totals, norm)
        except NotFinite:
            wait_for_all(reducer, clock)
            raise
        if decision.factor is None:
            return decision
        parts = iter(()) if has_stepped else reducer.parts(clock)
        if self._is_watched:
            wait_for_all(reducer, clock)
            parts = iter([reducer.gradients()])
        for gradients in parts:
            if decision.factor != 1 and gradients:
                torch._foreach_mul_(gradients, decision.factor)
            self.optimizer.step()
            clock.mark(Phase.OPTIMIZER)
        if reducer.gather_parameters():
            clock.mark(Phase.EXCHANGE)
        if self.average:
            with torch.no_grad():
                torch._foreach_lerp_(self.average, self.parameters, 1 - (self.train.ema_decay or 0))
        return decision


def wait_for_all(reducer: Reducer, clock: StepClock) -> None:
    """Waits for gradients that are still under way after an exchange."""
    deque(reducer.parts(clock), 0)


@dataclass(frozen=True)
class ReducerByOptimizer:
    """A reducer for each optimizer, all of one kind."""

    of: Mapping[str, Reducer]

    @property
    def name(self) -> str:
        """Name of the candidate, such as mpi-node."""
        return next(iter(self.of.values())).name

    def close(self) -> None:
        """Closes all reducers."""
        for reducer in self.of.values():
            reducer.close()


@dataclass(frozen=True)
class FixedReducerFactory:
    """A reducer without alternatives; see reducer_choice.ReducerFactory."""

    candidate: Candidate
    make: Callable[[Candidate, Group], Reducer]
    sparse: Sequence[Parameter] = ()
    """Parameters whose gradients stay sparse."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        return [self.candidate]

    def open(self, candidate: Candidate, group: Group) -> Reducer:
        return self.make(candidate, group)


AnyReducerFactory: TypeAlias = TorchReducerFactory | FixedReducerFactory


@dataclass(frozen=True)
class ReducerFactoryByOptimizer:
    """Reducers of several optimizers, chosen together; see reducer_choice.ReducerFactory."""

    of: Mapping[str, AnyReducerFactory]

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        return next(iter(self.of.values())).possible(config, world)

    def open(self, candidate: Candidate, group: Group) -> ReducerByOptimizer:
        return ReducerByOptimizer({name: reducers.open(candidate, group) for name, reducers in self.of.items()})


def copied_ahead(number: Number) -> Number:
    """A number that is on the host once a later copy from the same device is."""
    return number.to("cpu", non_blocking=True) if isinstance(number, Tensor) else number


def number(scalar: Tensor) -> Number:
    """A scalar as a float; on a GPU, where reading it would block, as a detached tensor."""
    return scalar.item() if scalar.device.type == "cpu" else scalar.detach()

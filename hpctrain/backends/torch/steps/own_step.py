"""Runs a task's own step: the actions behind the calls of its context."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.backends.torch.steps.batch_metrics import Scores
from hpctrain.backends.torch.steps.step_context import StepContext
from hpctrain.backends.torch.steps.update_step import StepParts
from hpctrain.backends.torch.steps.updates import GradientAccumulation, ReducerByOptimizer
from hpctrain.backends.torch.strategies.tp_group import HALVES, mapped
from hpctrain.backends.update import NotFinite, UpdateResult, ranks_at_fault
from hpctrain.comm.group import Group
from hpctrain.config.combinations import refusal
from hpctrain.config.features import Feature
from hpctrain.data.order import part_of
from hpctrain.errors import UserError
from hpctrain.system.user_errors import blamed, calling_line, shapes
from hpctrain.train.clock import NO_CLOCK, Phase, StepClock
from hpctrain.train.framework import HostBatch, copied, samples_of
from hpctrain.train.state import ArrayTensor

END, GATHER, NORMALISE = "ends its step", "calls ctx.gather", "runs a BatchNorm layer"
BACK = "passes gradients back through ctx.gather"
"""What a rank does, for messages."""
STEPS = "step/done"
"""Name of a state tensor: the number of calls of a task's own step."""


@dataclass(eq=False)
class CollectiveActions:
    """Carries out a step's calls on all ranks together."""

    parts: StepParts
    """What all steps share."""
    reducers: ReducerByOptimizer
    """Reducers of the gradients."""
    clock: StepClock
    """Records where time goes."""
    global_samples: int
    """Samples of all ranks together."""
    guard: OptimizerGuard
    """Allows optimizers to step."""
    applies: bool
    """Whether parameters are updated; rehearsals leave them unchanged."""
    accumulations: dict[str, GradientAccumulation] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group = self.parts.world.data
        self.labels = [END, GATHER, BACK, NORMALISE, *(update_call(name) for name in self.parts.optimizer_steps)]

    def backward(self, name: str, score: Any, samples: int, retain_graph: bool) -> None:
        self.clock.mark(Phase.FORWARD)
        optimizer_step = self.parts.optimizer_steps[name]
        reducer = self.reducers.of[name]
        if name not in self.accumulations:
            self.accumulations[name] = GradientAccumulation(reducer, optimizer_step.rule.scale, self.global_samples)
        reducer.begin_pass(is_last=False)  # which pass is the last is known only at the update
        run = functools.partial(differentiate, trainable(optimizer_step.parameters), retain_graph or None)
        with self.parts.compute.autocast(enabled=False):
            self.accumulations[name].add(score, samples, run)
        self.clock.mark(Phase.BACKWARD)

    def update(self, name: str) -> None:
        self.clock.mark(Phase.BACKWARD)
        self.agree(update_call(name))
        totals, own = self.accumulations.pop(name).exchange()
        self.clock.mark(Phase.EXCHANGE)
        self.losses.setdefault(name, []).append(totals.loss)
        if not self.applies:
            return
        try:
            with self.guard:
                decision = self.parts.optimizer_steps[name].update(self.reducers.of[name], totals, self.clock)
        except NotFinite as error:
            finite = math.isfinite(own[0])
            what = f"the loss of {name}" if name else "the loss"
            raise ranks_at_fault(error, self.group, finite, what) from None
        if decision.norm is not None:
            self.norms[f"grad_norm_{name}" if name else "grad_norm"] = decision.norm
        if self.parts.compute.low_precision is not None:
            torch.clear_autocast_cache()  # holds casts of the old weights
        self.clock.mark(Phase.OPTIMIZER)

    def gather(self, tensor: Tensor) -> Tensor:
        if self.group.size == 1:
            return tensor
        self.clock.mark(Phase.FORWARD)
        self.agree(GATHER)
        return gathered(tensor, self.group, self.clock, functools.partial(self.agree, BACK))

    def agree(self, doing: str) -> None:
        """Raises UserError, on all ranks, if ranks do not reach the same collective action. Collective."""
        group = self.group
        if not group.same(self.labels.index(doing), "reach the same point of their step"):
            everywhere = group.allgather(doing, "say what their step does")
            other = next(rank for rank, each in enumerate(everywhere) if each != everywhere[0])
            raise UserError(
                f"the ranks' steps differ: rank 0 {everywhere[0]}, and rank {other} {everywhere[other]}",
                "decide by values equal on all ranks, such as ctx.step, and not by a rank's own samples or losses",
            )

    def result(self, logged: Scores, samples: int) -> UpdateResult:
        """The result of the step."""
        known: Scores = {name: (norm, 1.0) for name, norm in self.norms.items()}
        means = {name: sum(losses) / len(losses) for name, losses in self.losses.items()}
        if means:
            known["loss"] = sum(means.values()) * samples, samples
            known |= {f"loss_{name}": (mean * samples, samples) for name, mean in means.items() if name}
        return UpdateResult(known | logged)


class DryActions:
    """Carries out calls on this rank alone: computes gradients and drops them."""

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.has_trained = False

    def backward(self, name: str, score: Any, samples: int, retain_graph: bool) -> None:
        self.has_trained = True
        total = score[0] if isinstance(score, tuple) else score
        parameters = trainable(self.parts.optimizer_steps[name].parameters)
        if not parameters:  # frozen for now
            return
        with self.parts.compute.autocast(enabled=False):
            found = torch.autograd.grad(total, parameters, retain_graph=retain_graph or None, allow_unused=True)
        if all(gradient is None for gradient in found):
            raise UserError(
                f"the loss given to ctx.backward depends on no parameter of optimizer {name or 'of the task'}"
                f"{calling_line()}",
                "compute it from outputs of the models that this optimizer trains, without .detach()",
            )

    def update(self, name: str) -> None:
        """Updates nothing."""

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


class OptimizerGuard:
    """Keeps a step from calling optimizers itself, which would ignore the other ranks' gradients.

    Args:
        optimizers: all optimizers of the task.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.is_open = False
        self.handles = [optimizer.register_step_pre_hook(self.check) for optimizer in optimizers]

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def close(self) -> None:
        """Removes the guard from the optimizers."""
        for handle in self.handles:
            handle.remove()

    def check(self, *call: object) -> None:
        """Raises UserError unless hpctrain makes an update."""
        if not self.is_open:
            what = f"step calls the step of an optimizer itself{calling_line()}"
            raise UserError(what, "call ctx.update, which takes the other ranks' gradients into account")


class OwnSteps:
    """The program of a task with its own step, which gets this rank's part of the global batch as one batch; see
    UpdateStep.

    Args:
        parts: the common parts of programs.
        step: the task's step.
        optimizers: all optimizers of the task.
    """

    def __init__(
        self,
        parts: StepParts,
        step: Callable[[StepContext, Any], Any],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.parts, self.step = parts, step
        self.guard = OptimizerGuard(optimizers)
        self.updates = 0
        self.done = np.zeros((), np.int64)
        self.counters = [ArrayTensor(STEPS, self.done)]

    def run(self, micro_batches: Sequence[HostBatch], global_samples: int) -> UpdateResult:
        parts = self.parts
        parts.modes.train()
        if global_samples < parts.world.data.size:
            uses = {Feature.SHORT_BATCH: global_samples, Feature.RANKS: parts.world.data.size}
            raise refusal(uses | {Feature.OWN_STEP: True})
        reducers = parts.reducers.chosen(functools.partial(self._rehearse, micro_batches, global_samples))
        self.updates += 1
        with parts.batch_norms.update(len(micro_batches)):
            result = self._call(micro_batches[0], global_samples, reducers, parts.clock)
        self.done += 1
        return result

    def _rehearse(self, micro_batches: Sequence[HostBatch], global_samples: int, reducers: ReducerByOptimizer) -> None:
        with self.parts.batch_norms.update(len(micro_batches)):
            self._call(copied(micro_batches[0]), global_samples, reducers, NO_CLOCK, applies=False)

    def _call(
        self, host: HostBatch, global_samples: int, reducers: ReducerByOptimizer, clock: StepClock, applies: bool = True
    ) -> UpdateResult:
        """One step. Collective.

        Args:
            host: this rank's part of the global batch.
            global_samples: samples of all ranks together.
            reducers: reducers of the gradients.
            clock: records where time goes.
            applies: whether parameters are updated.
        """
        batch = self.parts.compute.tensors(host)
        clock.mark(Phase.TO_DEVICE)
        group = self.parts.world.data
        rows = part_of(global_samples, group.rank, group.size)
        actions = CollectiveActions(self.parts, reducers, clock, global_samples, self.guard, applies)
        context = StepContext(self.parts, actions, rows, global_samples, int(self.done), group.size)
        self.parts.batch_norms.begin_micro_batch(0, functools.partial(actions.agree, NORMALISE))
        with self.parts.compute.autocast():
            logged = context._finish(self.step(context, batch))
        actions.agree(END)
        return actions.result(logged, rows.stop - rows.start)

    def dry_call(self, batch: HostBatch) -> None:
        """Runs one step on this rank alone without changing parameters.

        Raises:
            UserError: the step fails (the error names the user's line), or does nothing.
        """
        tensors = self.parts.compute.tensors(copied(batch))
        samples = samples_of(tensors)
        actions = DryActions(self.parts)
        context = StepContext(self.parts, actions, slice(0, samples), samples, int(self.done), ranks=1)
        fix = f"step(ctx, batch) gets a hpctrain.StepContext, and a dict of {shapes(tensors)}"
        parameters = [parameter for one in self.parts.optimizer_steps.values() for parameter in one.parameters]
        with self.parts.compute.autocast(), no_other_backward(parameters), blamed("step", fix):
            returned = self.step(context, tensors)
        if not (context._finish(returned) or actions.has_trained or returned is not None):
            raise UserError(
                "step neither calls ctx.backward nor reports anything: nothing would be trained",
                "call ctx.backward(loss) and ctx.update(); to skip a batch on purpose, return {}",
            )

    def close(self) -> None:
        """Lets optimizers step by themselves again."""
        self.guard.close()


def trainable(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that the step has not frozen."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def differentiate(parameters: list[Tensor], retain_graph: bool | None, total: Tensor) -> None:
    """Adds the gradients of a loss to those of the parameters, of which there may be none."""
    if parameters:
        torch.autograd.backward(total, inputs=parameters, retain_graph=retain_graph)


@contextlib.contextmanager
def no_other_backward(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Raises UserError if code in the body calls a loss's ``backward`` itself."""

    def refuse(parameter: Tensor) -> None:
        what = f"step calls backward of a loss itself{calling_line()}"
        raise UserError(what, "call ctx.backward(loss), so that gradients are averaged over the ranks")

    handles = [parameter.register_post_accumulate_grad_hook(refuse) for parameter in trainable(parameters)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def own_models(model: Any, compiled: Callable[[Any], Any]) -> Mapping[str, Module]:
    """The models of a task as they are called, by name."""
    named = model if isinstance(model, Mapping) else {"model": model}
    return MappingProxyType({name: compiled(each) for name, each in named.items()})


def update_call(name: str) -> str:
    """What a rank does, for messages."""
    return f"calls ctx.update({repr(name) if name else ''})"


def gathered(tensor: Tensor, group: Group, clock: StepClock, agree: Callable[[], None]) -> Tensor:
    """Gathers the rows of all ranks, in rank order. Collective, and so is the backward pass.

    Args:
        tensor: [n, ...]; the shape is the same on all ranks except for n.
        group: the ranks.
        clock: records the time of the exchange.
        agree: called before the collective of the backward pass.
    """
    begin = sum(group.allgather(len(tensor), "say how many rows they gather")[: group.rank])
    rows = len(tensor)

    def everything(own: Tensor) -> Tensor:
        host = own.detach().cpu().contiguous()
        values = (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy()
        found = torch.from_numpy(group.allgather_array(values, "gather their rows"))
        clock.mark(Phase.EXCHANGE)
        return (found.view(own.dtype) if own.dtype == torch.bfloat16 else found).to(own.device)

    def summed(gradient: Tensor) -> Tensor:
        clock.mark(Phase.BACKWARD)
        agree()
        wide = gradient.to("cpu", torch.float32 if gradient.dtype in HALVES else gradient.dtype).contiguous()
        total = group.sum(wide.numpy(), "sum the gradients of gathered rows")
        clock.mark(Phase.EXCHANGE)
        return torch.from_numpy(total[begin : begin + rows]).to(gradient.device, gradient.dtype)

    return mapped(tensor, everything, summed)

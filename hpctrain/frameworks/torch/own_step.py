"""A task's own step: what it may do with its models and optimizers, and what becomes of it on several ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.comm.group import Group
from hpctrain.data import part_of
from hpctrain.errors import UserError
from hpctrain.frameworks.torch.dry_call import describe, require_score
from hpctrain.frameworks.torch.gather import gathered
from hpctrain.frameworks.torch.shares import ONLY
from hpctrain.frameworks.torch.updates import Exchanges, Passes, Trained
from hpctrain.frameworks.update import NotFinite, ranks_at_fault
from hpctrain.reduce.torch_reducer import Number
from hpctrain.tasks.blame import blamed, calling_line, shapes
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.framework import Sums

RESERVED = ("grad_norm", "seconds/")
"""Begin the names of what is reported beside the metrics of a step."""


class Acts(Protocol):
    """What the calls of a step do."""

    def backward(self, name: str, score: Any, samples: int, retain_graph: bool) -> None:
        """Adds the gradients of a loss to those of an optimizer's next update."""

    def update(self, name: str) -> None:
        """Ends an update."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks."""


class StepContext:
    """What the ``step`` of a TorchTask trains with: ``step(ctx, batch)`` is called once for each global batch.

    ``batch`` is this rank's part of it, a dict of tensors on the device with a leading sample axis. Losses are means
    over these samples, or (sum, weight); the context weights them, so that each update's gradient is that of the mean
    over the global batch. Every rank has to make the same calls in the same order.
    """

    models: Mapping[str, Module]
    """The task's, by name; a model without a name is ``model``."""
    step: int
    """Calls of ``step`` done before this one, over resumes; the same on all ranks."""
    device: torch.device
    """Of the models and the batch."""
    global_samples: int
    """Samples in all ranks' parts together."""
    rows: slice
    """This rank's part among the samples of all ranks, as ``gather`` joins them."""

    def __init__(self, setting: Setting, acts: Acts, samples: int, global_samples: int, step: int) -> None:
        """Made by hpctrain.

        Args:
            setting: what is the same in each step.
            acts: what the calls do.
            samples: of this rank.
            global_samples: of all ranks.
            step: steps done.
        """
        self.models = setting.models
        self.device = setting.device
        self.step = step
        self.global_samples = global_samples
        self.rows = part_of(global_samples, setting.group.rank, setting.group.size)
        self._setting = setting
        self._acts = acts
        self._samples = samples
        self._part = 0
        self._open: dict[str, list[int | None]] = {}
        self._logged: dict[str, tuple[Number, Number]] = {}

    @property
    def model(self) -> Module:
        """The task's only model."""
        if len(self.models) > 1:
            fix = f"write ctx.models[...] with one of {', '.join(map(repr, self.models))}"
            raise UserError(f"ctx.model: the task has several models{calling_line()}", fix)
        return next(iter(self.models.values()))

    def split(self, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Cuts the batch into ``train.accumulate`` micro-batches: ``for part in ctx.split(batch): ...``.

        What is passed to ``backward`` and ``log`` in the loop is weighted by the samples of the part.

        Args:
            batch: that of the step, or another dict of tensors with as many rows.
        """
        samples, accumulate = self._samples, self._setting.accumulate
        odd = [name for name, tensor in batch.items() if tensor.ndim == 0 or len(tensor) != samples]
        if odd:
            what = f"ctx.split: {odd[0]} has shape {list(batch[odd[0]].shape)} in a batch of {samples} samples"
            raise UserError(what + calling_line(), "give arrays with a row for each sample, or set train.accumulate: 1")
        try:
            for number in range(min(accumulate, samples)):
                rows = part_of(samples, number, accumulate)
                self._part, self._samples = number + 1, rows.stop - rows.start
                yield {name: tensor[rows] for name, tensor in batch.items()}
        finally:
            self._part, self._samples = -1, samples

    def backward(self, loss: Any, name: str | None = None, *, retain_graph: bool = False) -> None:
        """Adds the gradients of a loss, with respect to an optimizer's parameters alone, to those of its next update.

        Args:
            loss: a scalar tensor, the mean over the samples; or two, (sum, weight).
            name: of the optimizer; may be left out if there is one.
            retain_graph: another backward pass through the same graph follows.

        Raises:
            UserError: the loss is no scalar or depends on nothing that is trained, or there is no such optimizer.
        """
        call = "ctx.backward(loss)" if name is None else f"ctx.backward(loss, {name!r})"
        optimizer = self._optimizer(name, call)
        require_value(loss, f"the loss of {call}")
        total = loss[0] if isinstance(loss, tuple) else loss
        if not (isinstance(total, Tensor) and total.requires_grad):
            raise UserError(
                f"the loss of {call} does not depend on any parameter{calling_line()}",
                "compute it from outputs of ctx.models with torch operations, without .item(), .detach() or NumPy",
            )
        marks = self._open.setdefault(optimizer, [])
        mark = self._part if isinstance(loss, tuple) else None
        is_mixed = bool(marks) and (mark is None) != (marks[0] is None)
        if is_mixed or (mark is not None and mark in marks):
            raise UserError(
                f"{call} adds a (sum, weight) loss to another loss of the same update{calling_line()}",
                "add them up before one ctx.backward, or give means",
            )
        self._acts.backward(optimizer, loss, self._samples, retain_graph)
        marks.append(mark)

    def update(self, name: str | None = None) -> None:
        """Averages an optimizer's gradients over all ranks, clips them, and updates its parameters. Collective.

        Args:
            name: of the optimizer; may be left out if there is one.

        Raises:
            UserError: no loss was passed to ``backward`` since its last update, or there is no such optimizer.
            NonFiniteLoss: loss or gradient is not finite; on all ranks.
        """
        call = f"ctx.update({'' if name is None else repr(name)})"
        optimizer = self._optimizer(name, call)
        if optimizer not in self._open:
            raise UserError(
                f"{call} without a {call.replace('update(', 'backward(loss, ').replace(', )', ')')} before it"
                f"{calling_line()}",
                "pass each optimizer's loss to ctx.backward, and then update it once",
            )
        if self._part > 0:
            raise UserError(
                f"{call} in the loop over ctx.split, before all gradients are there{calling_line()}",
                "update behind the loop: an update is for the whole global batch",
            )
        del self._open[optimizer]
        self._acts.update(optimizer)

    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks, in the order of the global batch. Gradients flow back to the rank of each row.

        A loss over the gathered rows, be it the same on all ranks or the mean over this rank's own rows, so has the
        gradient that one process would compute. Collective.

        Args:
            tensor: [n, ...]; n may differ between ranks.

        Returns:
            [sum of all n, ...], of the same dtype and device.

        Raises:
            UserError: it is called for a micro-batch, which would make the loss depend on train.accumulate.
        """
        if self._setting.accumulate > 1:
            raise UserError(
                f"ctx.gather: with train.accumulate: {self._setting.accumulate} a loss over the global batch would be "
                f"one over a part of it{calling_line()}",
                "set train.accumulate: 1",
            )
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            raise UserError(
                f"ctx.gather got {describe(tensor)} without rows{calling_line()}", "give a tensor with a leading axis"
            )
        return self._acts.gather(tensor)

    def log(self, name: str, value: Any) -> None:
        """Reports a metric, averaged over samples, ranks and the steps of an interval.

        Args:
            name: of the metric. What is logged as ``loss`` stands for the run's loss; else that is the sum of the
                optimizers' losses.
            value: a number or a scalar tensor, the mean over the samples; or (sum, weight).
        """
        if not isinstance(name, str) or not name or name.startswith(RESERVED):
            raise UserError(
                f"a step cannot report a metric as {name!r}{calling_line()}", "choose a name such as 'accuracy'"
            )
        require_value(value, f"the value of {name!r}")
        total, weight = value if isinstance(value, tuple) else (value * self._samples, self._samples)
        before = self._logged.get(name, (0.0, 0.0))
        self._logged[name] = before[0] + detached(total), before[1] + detached(weight)

    def _optimizer(self, name: str | None, call: str) -> str:
        """Which of the task's optimizers a call means."""
        trained = self._setting.trained
        if name is not None and name in trained:
            return name
        if name is None and len(trained) == 1:
            return next(iter(trained))
        known = ", ".join(map(repr, trained))
        if name is None:
            raise UserError(f"{call}: the task has several optimizers{calling_line()}", f"name one of {known}")
        only = ONLY in trained
        raise UserError(
            f"{call}: the task has {'one optimizer, without a name' if only else 'no optimizer of this name'}"
            f"{calling_line()}",
            "leave the name out" if only else f"name one of {known}",
        )

    def _finish(self, returned: Any) -> dict[str, tuple[Number, Number]]:
        """What was logged. Raises UserError if the step has left something undone."""
        if returned is not None and not isinstance(returned, Mapping):
            raise UserError(
                f"step returned {describe(returned)}",
                "return a dict of metrics, or nothing; losses go to ctx.backward, followed by ctx.update",
            )
        for name, value in (returned or {}).items():
            self.log(name, value)
        if self._open:
            shown = ", ".join(repr(name) if name else "" for name in self._open)
            raise UserError(
                f"step ended after ctx.backward without ctx.update({shown})",
                "update each optimizer in the step that computed its gradients; train.accumulate and ctx.split make "
                "updates of several micro-batches",
            )
        if self._setting.accumulate > 1 and not self._part:
            raise UserError(
                f"train.accumulate is {self._setting.accumulate}, but step never calls ctx.split",
                "write `for part in ctx.split(batch): ...` around the backward passes, or set train.accumulate: 1",
            )
        return self._logged


@dataclass(frozen=True)
class Setting:
    """What is the same in all steps."""

    models: Mapping[str, Module]
    device: torch.device
    trained: Mapping[str, Trained]
    accumulate: int
    group: Group
    low_precision: torch.dtype | None

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Of forward passes; backward passes are outside of it."""
        if self.low_precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.low_precision, enabled=enabled)


class Live:
    """Acts on all ranks together.

    Args:
        setting: see there.
        exchanges: of the gradients.
        clock: told where the time goes.
        global_samples: of all ranks.
        guard: lets optimizers step.
        applies: whether parameters are updated; rehearsals leave them as they are.
    """

    def __init__(
        self,
        setting: Setting,
        exchanges: Exchanges,
        clock: StepClock,
        global_samples: int,
        guard: Guard,
        applies: bool,
    ) -> None:
        self.setting, self.exchanges, self.clock = setting, exchanges, clock
        self.global_samples, self.guard, self.applies = global_samples, guard, applies
        self.labels = ["ends its step", "calls ctx.gather", *(update_call(name) for name in setting.trained)]
        self.passes: dict[str, Passes] = {}
        self.losses: dict[str, list[float]] = {}
        self.norms: dict[str, float] = {}

    def backward(self, name: str, score: Any, samples: int, retain_graph: bool) -> None:
        self.clock.mark(Phase.FORWARD)
        trained = self.setting.trained[name]
        if name not in self.passes:
            reducer = self.exchanges.of[name]
            self.passes[name] = Passes(reducer, trained.rule.scale, self.global_samples)
            reducer.last_backward = False  # which one is the last shows when the update comes
        run = functools.partial(
            torch.autograd.backward, inputs=list(trained.parameters), retain_graph=retain_graph or None
        )
        with self.setting.autocast(enabled=False):
            self.passes[name].add(score, samples, run)
        self.clock.mark(Phase.BACKWARD)

    def update(self, name: str) -> None:
        self.clock.mark(Phase.BACKWARD)
        self.agree(update_call(name))
        passes, trained = self.passes.pop(name), self.setting.trained[name]
        totals = passes.exchange()
        self.clock.mark(Phase.EXCHANGE)
        self.losses.setdefault(name, []).append(totals.loss)
        if not self.applies:
            return
        try:
            with self.guard:
                decision = trained.update(self.exchanges.of[name], totals)
        except NotFinite:
            own = bool(torch.isfinite(torch.as_tensor(passes.loss)).all())
            raise ranks_at_fault(self.setting.group, own, f"the loss of {name}" if name else "the loss") from None
        if decision.norm is not None:
            self.norms[f"grad_norm_{name}" if name else "grad_norm"] = decision.norm
        if self.setting.low_precision is not None:
            torch.clear_autocast_cache()  # copies of the old weights
        self.clock.mark(Phase.OPTIMIZER)

    def gather(self, tensor: Tensor) -> Tensor:
        if self.setting.group.size == 1:
            return tensor
        self.clock.mark(Phase.FORWARD)
        self.agree("calls ctx.gather")
        return gathered(tensor, self.setting.group, self.clock)

    def agree(self, doing: str) -> None:
        """Raises UserError, on all ranks, if the next thing that they do together is not the same one. Collective."""
        group = self.setting.group
        if not group.same(self.labels.index(doing), "come to the same point of their step"):
            told = group.allgather(doing, "say what their step does")
            other = next(rank for rank, each in enumerate(told) if each != told[0])
            raise UserError(
                f"the ranks' steps differ: rank 0 {told[0]}, and rank {other} {told[other]}",
                "decide by what is equal on all ranks, such as ctx.step, and not by a rank's own samples or losses",
            )

    def result(self, logged: Mapping[str, tuple[Number, Number]], samples: int) -> OwnResult:
        """Of the step."""
        known: dict[str, tuple[Number, Number]] = {name: (norm, 1.0) for name, norm in self.norms.items()}
        means = [sum(losses) / len(losses) for losses in self.losses.values()]
        if means:
            known["loss"] = sum(means) * samples, samples
        return OwnResult(known | dict(logged))


class Dry:
    """Computes gradients and forgets them; knows no other rank."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def backward(self, name: str, score: Any, samples: int, retain_graph: bool) -> None:
        total = score[0] if isinstance(score, tuple) else score
        parameters = self.setting.trained[name].parameters
        with self.setting.autocast(enabled=False):
            found = torch.autograd.grad(total, list(parameters), retain_graph=retain_graph or None, allow_unused=True)
        if all(gradient is None for gradient in found):
            raise UserError(
                f"the loss given to ctx.backward depends on no parameter of optimizer {name or 'of the task'}"
                f"{calling_line()}",
                "compute it from outputs of the models that this optimizer trains, without .detach()",
            )

    def update(self, name: str) -> None:
        """Nothing is updated."""

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


class Guard:
    """Keeps optimizers from stepping by themselves, which would leave out the other ranks.

    Args:
        optimizers: of the task.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.is_open = False
        self.handles = [optimizer.register_step_pre_hook(self.check) for optimizer in optimizers]

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def close(self) -> None:
        """Lets them step again."""
        for handle in self.handles:
            handle.remove()

    def check(self, *call: object) -> None:
        """Raises UserError unless an update is under way."""
        if not self.is_open:
            what = f"step calls the step of an optimizer itself{calling_line()}"
            raise UserError(what, "call ctx.update, which takes the other ranks' gradients into account")


@dataclass(frozen=True)
class OwnResult:
    """What a step reported; see StepResult."""

    values: Mapping[str, tuple[Number, Number]]
    """(sum, weight) by name."""

    def sums(self) -> Sums:
        return {name: (float(total), float(weight)) for name, (total, weight) in self.values.items()}


class OwnSteps:
    """Calls a task's step.

    Args:
        task: has a step.
        setting: what is the same in all steps.
        optimizers: all of the task.
    """

    def __init__(self, task: TorchTask, setting: Setting, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        assert task.step is not None, "open_torch looks"
        self.step = task.step
        self.setting = setting
        self.guard = Guard(optimizers)

    def run(
        self,
        batch: dict[str, Tensor],
        global_samples: int,
        exchanges: Exchanges,
        clock: StepClock,
        done: int,
        applies: bool = True,
    ) -> OwnResult:
        """One step. Collective.

        Args:
            batch: this rank's part of the global batch.
            global_samples: of all ranks.
            exchanges: of the gradients.
            clock: told where the time goes.
            done: steps before.
            applies: whether parameters are updated.
        """
        samples = len(next(iter(batch.values())))
        live = Live(self.setting, exchanges, clock, global_samples, self.guard, applies)
        context = StepContext(self.setting, live, samples, global_samples, done)
        with self.setting.autocast():
            logged = context._finish(self.step(context, batch))
        live.agree("ends its step")
        return live.result(logged, samples)

    def dry_call(self, batch: dict[str, Tensor], done: int) -> None:
        """One step on this rank alone that changes no parameter.

        Raises:
            UserError: the step fails; names the user's line.
        """
        samples = len(next(iter(batch.values())))
        context = StepContext(self.setting, Dry(self.setting), samples, samples, done)
        fix = f"step(ctx, batch) gets a hpctrain.StepContext, and a dict of {shapes(batch)}"
        parameters = [parameter for trained in self.setting.trained.values() for parameter in trained.parameters]
        with self.setting.autocast(), no_other_backward(parameters), blamed("step", fix):
            returned = self.step(context, batch)
        context._finish(returned)


@contextlib.contextmanager
def no_other_backward(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Raises UserError if code in the body calls ``backward`` of a loss itself."""

    def refuse(parameter: Tensor) -> None:
        what = f"step calls backward of a loss itself{calling_line()}"
        raise UserError(what, "call ctx.backward(loss), by which the gradients become those of all ranks")

    handles = [parameter.register_post_accumulate_grad_hook(refuse) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def own_models(model: Any, compiled: bool) -> Mapping[str, Module]:
    """The models of a task by name."""
    named = model if isinstance(model, Mapping) else {"model": model}
    called: dict[str, Any] = {name: torch.compile(each) if compiled else each for name, each in named.items()}
    return MappingProxyType(called)


def require_value(value: Any, field: str) -> None:
    """Raises UserError, with the user's line, unless it is a scalar, or two."""
    try:
        require_score(value, field)
    except UserError as error:
        raise UserError(error.what + calling_line(), error.fix) from None


def update_call(name: str) -> str:
    """What a rank does, in words."""
    return f"calls ctx.update({repr(name) if name else ''})"


def detached(value: Any) -> Any:
    """Without its graph."""
    return value.detach() if isinstance(value, Tensor) else float(value)

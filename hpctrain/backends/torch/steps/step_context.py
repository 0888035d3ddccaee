"""The context with which the step of a PyTorch task trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn import Module

from hpctrain.backends.torch.steps.batch_metrics import Scores, sum_and_weight
from hpctrain.backends.torch.steps.update_step import StepParts
from hpctrain.backends.torch.task.checks import require_score
from hpctrain.backends.torch.task.shares import ONLY
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used
from hpctrain.data.order import part_of
from hpctrain.errors import UserError
from hpctrain.system.user_errors import calling_line, described
from hpctrain.train.evaluation import add
from hpctrain.train.metrics import is_taken


class StepActions(Protocol):
    """The actions behind the calls of a step."""

    def backward(self, name: str, score: Any, samples: int, retain_graph: bool) -> None:
        """Adds the gradients of a loss to those of an optimizer's next update."""

    def update(self, name: str) -> None:
        """Ends an update."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of all ranks."""


class StepContext:
    """What the ``step`` of a TorchTask trains with: ``step(ctx, batch)`` is called once for each global batch.

    ``batch`` is this rank's part of it, a dict of tensors on the device with a leading sample axis. Losses are means
    over these samples, or (sum, weight); the context weights them, so that each update's gradient is that of the mean
    over the global batch. Every rank must make the same calls in the same order.
    """

    models: Mapping[str, Module]
    """The task's models, by name; a model without a name is ``model``."""
    step: int
    """Calls of ``step`` before this one, including those before a resume; the same on all ranks."""
    device: torch.device
    """Device of the models and the batch."""
    global_samples: int
    """Samples in all ranks' parts together."""
    rows: slice
    """This rank's rows in the global batch, in the order of ``gather``."""

    def __init__(
        self, parts: StepParts, actions: StepActions, rows: slice, global_samples: int, step: int, ranks: int
    ) -> None:
        """Created by hpctrain.

        Args:
            parts: what all steps share.
            actions: the actions behind the calls.
            rows: this rank's rows in the global batch.
            global_samples: samples of all ranks together.
            step: number of earlier steps.
            ranks: number of ranks that have a part of the samples.
        """
        self.models = parts.models
        self.device = parts.compute.device
        self.step = step
        self.global_samples = global_samples
        self.rows = rows
        self._optimizer_steps = parts.optimizer_steps
        self._actions = actions
        self._samples = rows.stop - rows.start
        accumulate = next(iter(parts.optimizer_steps.values())).train.accumulate
        self._features = used({Feature.OWN_STEP: True, Feature.ACCUMULATE: accumulate > 1 and accumulate})
        self._parts = min(accumulate, global_samples // ranks)  # the same on all ranks: layers may communicate
        self._part = 0
        self._open: dict[str, list[int | None]] = {}
        self._logged: Scores = {}

    @property
    def model(self) -> Module:
        """The task's only model."""
        if len(self.models) > 1:
            fix = f"write ctx.models[...] with one of {', '.join(map(repr, self.models))}"
            raise UserError(f"ctx.model: the task has several models{calling_line()}", fix)
        return next(iter(self.models.values()))

    def split(self, batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Divides the batch into ``train.accumulate`` micro-batches: ``for part in ctx.split(batch): ...``.

        There are fewer if some rank has fewer samples; their number is the same on all ranks. Inside the loop, what is
        passed to ``backward`` and ``log`` is weighted by the samples of the micro-batch.

        Args:
            batch: the step's batch, or another dict of tensors with the same number of rows.
        """
        samples, parts = self._samples, self._parts
        odd = [name for name, tensor in batch.items() if tensor.ndim == 0 or len(tensor) != samples]
        if odd:
            what = f"ctx.split: {odd[0]} has shape {list(batch[odd[0]].shape)} in a batch of {samples} samples"
            raise UserError(what + calling_line(), "give arrays with a row for each sample, or set train.accumulate: 1")
        try:
            for number in range(parts):
                rows = part_of(samples, number, parts)
                self._part = number + 1
                self._samples = rows.stop - rows.start
                yield {name: tensor[rows] for name, tensor in batch.items()}
        finally:
            self._part, self._samples = -1, samples

    def backward(self, loss: Any, name: str | None = None, *, retain_graph: bool = False) -> None:
        """Adds the gradients of a loss, only with respect to an optimizer's parameters, to those of its next update.

        Args:
            loss: a scalar tensor, the mean over the samples; or two, (sum, weight).
            name: name of the optimizer; may be left out if there is only one.
            retain_graph: whether another backward pass through the same graph follows.

        Raises:
            UserError: the loss is not a scalar or depends on no trained parameter, or there is no such optimizer.
        """
        call = "ctx.backward(loss)" if name is None else f"ctx.backward(loss, {name!r})"
        optimizer = self._optimizer(name, call)
        require_value(loss, f"the loss of {call}")
        total = loss[0] if isinstance(loss, tuple) else loss
        if not (isinstance(total, torch.Tensor) and total.requires_grad):
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
        self._actions.backward(optimizer, loss, self._samples, retain_graph)
        marks.append(mark)

    def update(self, name: str | None = None) -> None:
        """Averages an optimizer's gradients over all ranks, clips them, and updates its parameters. Collective.

        Args:
            name: name of the optimizer; may be left out if there is only one.

        Raises:
            UserError: no loss was passed to ``backward`` since its last update, or there is no such optimizer.
            NonFiniteLoss: loss or gradient is not finite; raised on all ranks.
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
                "update after the loop: an update is for the whole global batch",
            )
        del self._open[optimizer]
        self._actions.update(optimizer)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of all ranks, in the order of the global batch; gradients flow back to each row's rank.

        A loss over the gathered rows therefore has the gradient that one process would compute, whether it is the same
        on all ranks or a mean over this rank's own rows. Collective.

        Args:
            tensor: [n, ...]; n may differ between ranks.

        Returns:
            [sum of all n, ...], of the same dtype and device.

        Raises:
            UserError: it is called on a micro-batch, which would make the loss depend on train.accumulate.
        """
        refuse(self._features | {Feature.GATHER: calling_line()})
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            raise UserError(
                f"ctx.gather got {described(tensor)} without rows{calling_line()}", "give a tensor with a leading axis"
            )
        return self._actions.gather(tensor)

    def log(self, name: str, value: Any) -> None:
        """Reports a metric, averaged over samples, ranks and the steps of an interval.

        Args:
            name: name of the metric. A value logged as ``loss`` replaces the run's loss, which otherwise is the sum of
                the optimizers' losses.
            value: a number or a scalar tensor, the mean over the samples; or (sum, weight).
        """
        if not isinstance(name, str) or not name or (name != "loss" and is_taken(name)):
            raise UserError(
                f"a step cannot report a metric as {name!r}{calling_line()}", "choose a name such as 'accuracy'"
            )
        require_value(value, f"the value of {name!r}")
        add(self._logged, {name: sum_and_weight(value, self._samples)})

    def _optimizer(self, name: str | None, call: str) -> str:
        """The name of the optimizer that a call refers to."""
        optimizer_steps = self._optimizer_steps
        if name is not None and name in optimizer_steps:
            return name
        if name is None and len(optimizer_steps) == 1:
            return next(iter(optimizer_steps))
        known = ", ".join(map(repr, optimizer_steps))
        if name is None:
            raise UserError(f"{call}: the task has several optimizers{calling_line()}", f"name one of {known}")
        only = ONLY in optimizer_steps
        raise UserError(
            f"{call}: the task has {'one optimizer, without a name' if only else 'no optimizer of this name'}"
            f"{calling_line()}",
            "leave the name out" if only else f"name one of {known}",
        )

    def _finish(self, returned: Any) -> Scores:
        """Returns what was logged; raises UserError if the step left something unfinished."""
        if returned is not None and not isinstance(returned, Mapping):
            raise UserError(
                f"step returned {described(returned)}",
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
        refuse(self._features | used({Feature.NO_SPLIT: not self._part}))
        return self._logged


def require_value(value: Any, field: str) -> None:
    """Raises UserError, with the user's line, unless the value is a scalar or a (sum, weight) pair."""
    try:
        require_score(value, field)
    except UserError as error:
        raise UserError(error.what + calling_line(), error.fix) from None

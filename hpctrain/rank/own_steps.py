"""What does not go with a task's own step, said before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.config.sections import Config
from hpctrain.data import Order, StreamOrder
from hpctrain.errors import UserError
from hpctrain.tasks.definition import Task, TorchScheduler, TorchTask, first_field


def has_own_step(task: Task) -> bool:
    """Whether the task says itself how a batch is trained on."""
    return isinstance(task, TorchTask) and task.step is not None


def pieces_of(config: Config, task: Task) -> int:
    """Micro-batches that the data come in: a step gets its batch whole, and cuts it by ``ctx.split``."""
    return 1 if has_own_step(task) else config.train.accumulate


def refuse_with_own_step(config: Config, task: Task, order: Order | StreamOrder, ranks: int) -> None:
    """Raises UserError for what a task with a step of its own cannot be combined with."""
    if not has_own_step(task):
        return
    if not callable(task.step) or isinstance(task.step, type):  # type: ignore[attr-defined]
        raise UserError("step of the task is not a function", "give a function step(ctx, batch)")
    rest = order.epoch_samples % order.global_batch if isinstance(order, Order) and not order.drop_last else 0
    judged = task.loss is not None or task.metrics
    refused = {
        f"an own step runs on all {ranks} ranks, and the last batch of an epoch has only {rest} samples": (
            0 < rest < ranks,
            "set data.drop_last: true, or choose another train.global_batch",
        ),
        "a TorchScheduler sets the rates of one optimizer, and the task has a dict of them": (
            isinstance(task.optimizer, Mapping) and isinstance(task.schedule, TorchScheduler),
            "give schedule: in the run file, or schedule=lambda step: factor, which apply to all optimizers",
        ),
        "the task has validation data, but neither loss nor metrics to judge them by": (
            task.validation is not None and not judged,
            "give metrics={...} or loss=, each a function(outputs, batch) of what forward returns",
        ),
        "the task has validation data and several models, but no forward": (
            task.validation is not None and isinstance(task.model, Mapping) and task.forward is first_field,
            "say what is evaluated: forward=lambda models, batch: models[...](batch[...])",
        ),
    }
    for what, (is_so, fix) in refused.items():
        if is_so:
            raise UserError(what, fix)

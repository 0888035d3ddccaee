"""Which features a task uses, so that those that do not go together are refused before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.config.combinations import Feature, used
from hpctrain.data.order import Order
from hpctrain.data.stream import StreamOrder
from hpctrain.tasks.definition import KerasTask, Task, TorchScheduler, TorchTask, first_field
from hpctrain.train.hooks import Hook, rate_hook


def has_own_step(task: Task) -> bool:
    """Whether the task says itself how a batch is trained on."""
    return isinstance(task, TorchTask) and task.step is not None


def micro_batches_of(task: Task, accumulate: int) -> int:
    """Micro-batches that the data come in: the task's own step gets its batch whole, and cuts it by ``ctx.split``."""
    return 1 if has_own_step(task) else accumulate


def task_features(name: str, task: Task, order: Order | StreamOrder, ranks: int) -> dict[Feature, Any]:
    """What the task, which the run file calls ``name``, and its data use in a run on a number of ranks."""
    rest = order.epoch_samples % order.global_batch if isinstance(order, Order) and not order.drop_last else 0
    validates, own_step = task.validation is not None, has_own_step(task)
    given = {
        Feature.KERAS: isinstance(task, KerasTask),
        Feature.NO_FORWARD: task.forward is first_field,
        Feature.NO_EVAL_LOSS: own_step and task.loss is None and not task.metrics,
        Feature.NO_VALIDATION: not validates and name,
        Feature.OWN_STEP: own_step,
        Feature.RANKS: ranks > 1 and ranks,
        Feature.NO_CUTS: isinstance(task, TorchTask) and not task.tensor,
        Feature.SAMPLER: task.sampler is not None,
        Feature.SEVERAL_MODELS: isinstance(task.model, Mapping),
        Feature.SEVERAL_OPTIMIZERS: isinstance(task.optimizer, Mapping),
        Feature.SHORT_BATCH: rest < ranks and rest,
        Feature.STREAM: isinstance(order, StreamOrder) and name,
        Feature.TASK_SCHEDULE: task.schedule is not None,
        Feature.VALIDATION: validates,
    }
    return used(given) | rate_features(task, task.hooks)


def rate_features(task: Task, hooks: Sequence[Hook]) -> dict[Feature, Any]:
    """What sets the learning rate and has state, among a task's schedule and some hooks."""
    scheduler = task.schedule if isinstance(task.schedule, TorchScheduler) else None
    given = {
        Feature.EVALUATION_SCHEDULER: scheduler is not None and scheduler.every == "evaluation",
        Feature.RATE_HOOK: rate_hook(hooks),
        Feature.TORCH_SCHEDULER: scheduler is not None,
    }
    return used(given)

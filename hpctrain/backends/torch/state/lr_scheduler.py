"""Hook that steps PyTorch's learning-rate schedulers; their state is saved like that of other hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchScheduler
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import RateHook, Training
from hpctrain.train.schedule import OwnRates, Schedule


class SchedulerHook(RateHook):
    """Steps a scheduler, which itself sets the rates of the optimizer's parameter groups.

    Args:
        given: the task's scheduler.
        optimizer: the task's optimizer.

    Raises:
        UserError: ``given`` makes no scheduler, or one that needs a metric but is not stepped by evaluations.
    """

    name = "scheduler"

    def __init__(self, given: TorchScheduler, optimizer: Optimizer) -> None:
        initial = rates(optimizer)
        self.given = given
        self.optimizer = optimizer
        self.initial_rate = initial[0] or 1.0
        self.scheduler = given.make(optimizer)
        self.known: tuple[int, OwnRates] | None = None
        if not isinstance(self.scheduler, LRScheduler):
            raise UserError(
                f"TorchScheduler(make) returned {type(self.scheduler).__name__}",
                "return one of torch.optim.lr_scheduler: TorchScheduler(lambda optimizer: StepLR(optimizer, 30))",
            )
        if isinstance(self.scheduler, ReduceLROnPlateau) and given.every != "evaluation":
            fix = "write TorchScheduler(..., every='evaluation', metric='loss')"
            raise UserError(f"ReduceLROnPlateau needs a metric, which TorchScheduler(every={given.every!r}) lacks", fix)

    def adjusted(self, schedule: Schedule) -> Schedule:
        return self.own_rates

    def own_rates(self, step: int) -> OwnRates:
        """Rates of the update after ``step`` completed ones, even if that update is done by now."""
        if self.known is None or self.known[0] != step:
            self.known = step, OwnRates(rates(self.optimizer)[0] / self.initial_rate)
        return self.known[1]

    def before_fit(self, training: Training) -> None:
        """Raises UserError if the scheduler ends before the run does: its next step would fail."""
        if not isinstance(self.scheduler, OneCycleLR) or self.given.every != "step":
            return
        total, steps = self.scheduler.total_steps, training.plan.total_steps
        if steps > total:
            raise UserError(
                f"{type(self.scheduler).__name__} has total_steps={total}, and the run has {steps} steps",
                f"make it with total_steps={steps}; a resumed run keeps the number of its checkpoint",
            )

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> None:
        if self.given.every == "evaluation":
            if not isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step()
            elif self.given.metric in metrics:
                self.scheduler.step(metrics[self.given.metric])
            else:
                raise UserError(
                    f"TorchScheduler(metric={self.given.metric!r}) names a metric that the task does not report",
                    f"name one of {', '.join(sorted(metrics))}",
                )

    def after_step(self, training: Training, result: StepResult) -> None:
        ends_epoch = training.state.batch == 0
        if self.given.every == "step" or (self.given.every == "epoch" and ends_epoch):
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """State of the scheduler and the values it set in parameter groups (rates, momentum, betas)."""
        return {"scheduler": self.scheduler.state_dict(), "groups": [numbers(each) for each in self.groups]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        try:
            self.scheduler.load_state_dict(as_before(saved["scheduler"], self.scheduler.state_dict()))
            for group, values in zip(self.groups, saved["groups"], strict=True):
                put_numbers(group, values)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            name = type(self.scheduler).__name__
            what = f"the checkpoint's state of the learning-rate scheduler does not fit {name}"
            raise UserError(what, "make the same scheduler, or begin again with --fresh") from error

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return self.optimizer.param_groups


def rates(optimizer: Optimizer) -> list[float]:
    """Learning rates of the parameter groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, and tuples of numbers, in a parameter group."""
    plain = {key: float(value) if key == "lr" else value for key, value in group.items() if key != "params"}
    return {key: value for key, value in plain.items() if is_number(value) or is_pair(value)}


def is_number(value: Any) -> bool:
    """Whether it is a Python number."""
    return isinstance(value, (bool, int, float))


def is_pair(value: Any) -> bool:
    """Whether it is a tuple of numbers, such as Adam's betas."""
    return isinstance(value, tuple) and all(map(is_number, value))


def put_numbers(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Restores values from ``numbers``."""
    for key, value in values.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def as_before(saved: Any, current: Any) -> Any:
    """Converts saved state to the types of the scheduler's state, such as Counter for MultiStepLR's milestones."""
    if isinstance(current, Counter):
        return Counter(saved)
    if isinstance(saved, dict) and isinstance(current, dict):
        return {key: as_before(value, current.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        return [as_before(*pair) for pair in zip(saved, current, strict=True)]
    return saved

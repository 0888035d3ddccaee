"""Layers are timed one by one, and nothing of it is left in the model."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.strategies.partition import uncut
from hpctrain.backends.torch.strategies.pipeline.layer_times import Whole
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import StageChoice
from hpctrain.backends.torch.strategies.pipeline.stages import Stages, layers_of, staged
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask
from tests.tasks import pipeline_tasks

PAUSE_S = 0.2


class PausesBack(torch.autograd.Function):
    """Takes longer backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return gradients[0]


class Back(nn.Linear):
    """A layer around that."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return PausesBack.apply(super().forward(x))  # type: ignore[no-untyped-call,no-any-return]


def slow_loss(outputs: Tensor, batch: Any) -> Tensor:
    time.sleep(PAUSE_S)
    return outputs.square().mean()


def mean(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().mean()


def chosen(task: TorchTask, batch: Any, told: list[Any], kept: tuple[int, ...] = ()) -> Stages:
    """The two stages of a task's model, on the only rank."""
    model, cpu = task.model, torch.device("cpu")
    assert isinstance(model, nn.Module)
    task_state = TaskState(task.optimizer, {"loss": task.loss, "forward": task.forward}, model, [])
    whole = Whole(task, model, task_state, uncut(), Compute(cpu))
    stages = staged(model, layers_of(model, task.layers), 2)
    choice = StageChoice(lambda: batch, kept, lambda *choice: told.append(choice))
    return whole.chosen(stages, choice, alone())


def of_sequence(*layers: nn.Module, loss: Any = mean, **more: Any) -> TorchTask:
    model = nn.Sequential(*layers)
    return TorchTask(model, loss, torch.optim.SGD(model.parameters(), 0.1), **more)


BATCH = {"x": np.ones((2, 4), np.float32)}


def test_backward_passes_count_and_the_loss_counts_for_the_last_layer():
    told: list[Any] = []
    task = of_sequence(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), Back(4, 4), loss=slow_loss)
    assert chosen(task, BATCH, told).counts == [3, 1]
    [(counts, seconds)] = told
    assert counts == [3, 1] and len(seconds) == 4
    assert max(seconds[:3]) < PAUSE_S and seconds[3] >= 2 * PAUSE_S


def test_layers_that_hand_on_nested_values_leave_no_trace():
    """With dropout, random numbers are where they were; no gradient is kept."""
    task, told = pipeline_tasks.gpt(dropout=0.5), list[Any]()
    assert isinstance(task.model, nn.Module)
    before = torch.get_rng_state()
    chosen(task, pipeline_tasks.tokens(), told)
    assert len(told[0][1]) == 6 and min(told[0][1]) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(one.grad is None for one in task.model.parameters())


class HandsOnASet(nn.Linear):
    """What no stage could send."""

    def forward(self, x: Any) -> Any:
        """Three of them."""
        (x,) = x if isinstance(x, set) else (x,)
        return {super().forward(x)}


class Opens(nn.Linear):
    """Makes a tensor of one of them."""

    def forward(self, x: Any) -> Any:
        (x,) = x
        return super().forward(x)


def of_sets(*layers: nn.Module) -> TorchTask:
    return of_sequence(*layers, forward=lambda model, batch: next(iter(model(batch["x"]))))


def test_no_stage_ends_where_a_layer_hands_on_what_cannot_be_sent():
    """Though its parameters alone would have the first layer be a stage."""
    told: list[Any] = []
    task = of_sets(HandsOnASet(4, 99), Opens(99, 4), HandsOnASet(4, 4))
    assert chosen(task, {}, told).counts == [1, 2], "no rank has samples"
    assert chosen(task, BATCH, told).counts == [2, 1]
    counts, seconds = told[-1]
    assert counts == [2, 1] and seconds[0] == 0 < min(seconds[1:])


def test_layers_of_which_none_can_be_apart_are_refused():
    with pytest.raises(
        UserError, match="layer 0 of layers= of the task passes on a value that another rank could not use"
    ):
        chosen(of_sets(HandsOnASet(4, 9), HandsOnASet(9, 4)), BATCH, [])


def test_nothing_is_timed_if_it_is_known():
    task, told = of_sequence(nn.Linear(4, 4), nn.Linear(4, 4), Back(4, 4)), list[Any]()
    assert chosen(task, None, told, kept=(2, 1)).counts == [2, 1]
    given = dataclasses.replace(task, layers=lambda model: [list(model)[:1], list(model)[1:]])
    assert chosen(given, None, told, kept=(2, 1)).counts == [1, 2]
    assert told == []


def test_errors_name_the_field_of_the_task():
    twice = of_sequence(nn.Linear(4, 4), nn.Linear(4, 4), forward=lambda model, batch: model(model(batch["x"])))
    with pytest.raises(UserError, match="forward calls the model twice"):
        chosen(twice, BATCH, [])
    with pytest.raises(UserError, match=r"^the model or forward"):
        chosen(of_sequence(nn.Linear(4, 4), nn.Linear(3, 4)), BATCH, [])

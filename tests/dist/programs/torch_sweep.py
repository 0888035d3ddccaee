"""Trains torch models one after the other and compares them with one process; see tests/support/sweep.py."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.backends.torch.task.opening import open_torch
from hpctrain.comm.world import World, connect
from hpctrain.config.sections import Config, ReduceConfig, TrainConfig
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import IntervalClock
from tests.support.sweep import Weights, batches, micro_batches, sweep
from tests.tasks.torch_modules import MODULES, Problem, everything, with_parameters


def task_of(problem: Problem) -> TorchTask:
    """A new task, with the same weights each time."""
    torch.manual_seed(7)
    model = problem.model()
    return TorchTask(model, problem.loss, problem.optimizer(model.parameters()), None, forward=problem.forward)


def weights(task: TorchTask) -> Weights:
    """All parameters."""
    return [parameter.detach().to(torch.float64, copy=True).numpy() for parameter in task.model.parameters()]


def on_ranks(problem: Problem, world: World) -> tuple[Weights, Weights]:
    """Weights before and after the updates on all ranks."""
    task = task_of(problem)
    train = TrainConfig(steps=1, global_batch=1, **problem.train)
    kind: Any = "mpi" if world.size > 1 else "none"
    config = Config(name="sweep", task="a:b", train=train, reduce=ReduceConfig(kind=kind))
    framework = open_torch(task, world, config, IntervalClock(), ReducerChoice(config.reduce, world))
    before = weights(task)
    for batch in batches(problem.fields):
        framework.step(micro_batches(batch, world.data, train.accumulate), len(batch["x"]))
    framework.close()
    return before, weights(task)


def exact(problem: Problem) -> Weights:
    """The result of a hand-written loop on whole batches."""
    task = task_of(problem)
    for batch in batches(problem.fields):
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        loss = task.loss(task.forward(task.model, tensors), tensors)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        task.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        task.optimizer.step()
    return weights(task)


def main() -> None:
    """Run the sweep; rank 0 prints."""
    torch.set_num_threads(1)
    world = connect()
    missing = with_parameters() - MODULES.keys()
    sweep(everything(), world.data, lambda problem: on_ranks(problem, world), exact, missing)


if __name__ == "__main__":
    main()

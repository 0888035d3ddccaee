"""Tasks with a custom ``step``, plain loops that do the same in one process, and a framework around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.backends.torch.task.opening import open_torch
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.comm.world import World
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.data.order import part_of
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import IntervalClock

SAMPLES = 53
GLOBAL_BATCH = 15
"""Ranks get uneven parts, and the last batch of an epoch has 8 samples."""
Batch = dict[str, NDArray[Any]]


def samples() -> Batch:
    """Fixed samples: float64 points, other views of them, and noise for each."""
    random = np.random.default_rng(5)
    points = random.normal(size=(SAMPLES, 6))
    return {"x": points, "view": points + 0.1 * random.normal(size=points.shape), "z": random.normal(size=(SAMPLES, 3))}


def global_batches(count: int) -> Iterator[Batch]:
    """Global batches in order, epoch after epoch."""
    everything = samples()
    starts = range(0, SAMPLES, GLOBAL_BATCH)
    for step in range(count):
        begin = starts[step % len(starts)]
        yield {name: array[begin : begin + GLOBAL_BATCH] for name, array in everything.items()}


def part_of_rank(batch: Batch, world: World) -> Batch:
    """This rank's part of a global batch."""
    rows = part_of(len(batch["x"]), world.data.rank, world.data.size)
    return {name: array[rows] for name, array in batch.items()}


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """A two-layer network in double precision."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with a learning rate high enough to reveal differences."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def real(scores: Tensor) -> Tensor:
    """Loss of scores of samples that should be classified as real."""
    return functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def made_up(scores: Tensor) -> Tensor:
    """Loss of scores of samples that should be classified as generated."""
    return functional.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))


def gan_step(ctx: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two backward passes for the discriminator, and one for the generator in every second step."""
    generator, discriminator = ctx.models["generator"], ctx.models["discriminator"]
    for part in ctx.split(batch):
        ctx.backward(real(discriminator(part["x"])), "discriminator")
        ctx.backward(made_up(discriminator(generator(part["z"]).detach())), "discriminator")
    ctx.update("discriminator")
    if ctx.step % 2 == 0:
        for part in ctx.split(batch):
            ctx.backward(real(discriminator(generator(part["z"]))), "generator")
        ctx.update("generator")
    return {"score": discriminator(batch["x"]).mean()}


def gan(**changes: Any) -> TorchTask:
    """A task with two models and two optimizers."""
    models = {"generator": perceptron(3, 6), "discriminator": perceptron(6, 1)}
    optimizers = {name: adam(model) for name, model in models.items()}
    made = TorchTask(model=models, optimizer=optimizers, train=samples(), step=gan_step)
    return dataclasses.replace(made, **changes)


def single_gan() -> TorchTask:
    """``gan`` in single precision, which train.precision asks for."""
    made = gan(step=lambda ctx, batch: gan_step(ctx, {name: value.float() for name, value in batch.items()}))
    for model in made.model.values():
        model.float()
    return made


def normalised_gan(**changes: Any) -> TorchTask:
    """A GAN with BatchNorm and SGD: Adam would take full steps by the rounding errors of biases before BatchNorm."""
    models = {"generator": normalised(3, 6), "discriminator": normalised(6, 1)}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for name, model in models.items()}
    return gan(model=models, optimizer=optimizers, **changes)


def normalised(inputs: int, outputs: int) -> nn.Module:
    """A two-layer network with BatchNorm in double precision."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, outputs)).double()


def distance(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared distance from the other view."""
    return (outputs - batch["view"]).square().mean()


def cut_step(ctx: Any, batch: dict[str, Tensor]) -> None:
    """Do what training does for a task without ``step``."""
    for part in ctx.split(batch):
        ctx.backward(distance(ctx.model(part["x"]), part))
    ctx.update()


def with_batchnorm(step: Callable[..., Any] | None) -> TorchTask:
    """A task with one model, with or without ``step``."""
    model = normalised(6, 6)
    return TorchTask(model, distance, torch.optim.SGD(model.parameters(), 0.05), samples(), step=step)


def pair_loss(points: Tensor, views: Tensor, first: int = 0) -> Tensor:
    """InfoNCE: each point against all views; ``first`` is the index of the first point's own view."""
    scores = functional.normalize(points, dim=1) @ functional.normalize(views, dim=1).T / 0.1
    return functional.cross_entropy(scores, torch.arange(first, first + len(points)))


def whole_step(ctx: Any, batch: dict[str, Tensor]) -> None:
    """Compute the loss of the global batch on every rank."""
    points, views = ctx.gather(ctx.model(batch["x"])), ctx.gather(ctx.model(batch["view"]))
    ctx.backward(pair_loss(points, views))
    ctx.update()


def own_rows_step(ctx: Any, batch: dict[str, Tensor]) -> None:
    """Compare each rank's rows with those of all ranks: less work for the same gradient."""
    points, views = ctx.model(batch["x"]), ctx.gather(ctx.model(batch["view"]))
    ctx.backward(pair_loss(points, views, ctx.rows.start))
    ctx.update()


def weighted_step(ctx: Any, batch: dict[str, Tensor]) -> None:
    """Weight samples differently, some with 0."""
    for part in ctx.split(batch):
        weights = part["x"][:, 0].abs() * (part["x"][:, 1] > 0)
        errors = (ctx.model(part["x"]) - part["view"]).square().mean(1)
        ctx.backward(((errors * weights).sum(), weights.sum()))
    ctx.update()


def one(step: Callable[..., Any]) -> TorchTask:
    """A task with one model and one optimizer, without names."""
    model = perceptron(6, 6)
    return TorchTask(model=model, optimizer=adam(model), train=samples(), step=step)


def make_framework(
    world: World,
    task: Callable[[], TorchTask] = gan,
    way: str | None = None,
    choice: Callable[[ReduceConfig, World, str | None], ReducerChoice] = ReducerChoice,
    reduce: Mapping[str, Any] | None = None,
    parallel: ParallelConfig | None = None,
    **train: Any,
) -> TorchFramework:
    """A framework around a new task with the same initial weights everywhere."""
    torch.manual_seed(3)
    config = Config(
        name="test",
        task="a:b",
        seed=11,
        train=TrainConfig(steps=1, global_batch=GLOBAL_BATCH, **train),
        reduce=ReduceConfig(**{"bucket_bytes": 1024, **(reduce or {})}),
        parallel=parallel or ParallelConfig(),
    )
    return open_torch(task(), world, config, IntervalClock(), choice(config.reduce, world, way))


def train(framework: TorchFramework, steps: int, begin: int = 0, pieces: int = 1) -> list[dict[str, float]]:
    """Train, and return what each step reports, averaged over ranks; ``pieces`` is the number of micro-batches."""
    group = framework.world.data
    reported = []
    for batch in list(global_batches(steps))[begin:]:
        mine = part_of_rank(batch, framework.world)
        rows = [part_of(len(mine["x"]), number, pieces) for number in range(pieces)]
        cut = [{name: array[each] for name, array in mine.items()} for each in rows]
        sums = framework.step(cut, len(batch["x"])).sums()
        totals = group.sum(np.array([sums[name] for name in sorted(sums)]), "average what is reported")
        reported.append({name: pair[0] / pair[1] for name, pair in zip(sorted(sums), totals, strict=True)})
    return reported


def weights(framework: TorchFramework) -> list[float]:
    """All weights, flattened."""
    return torch.cat([parameter.detach().flatten() for parameter in framework.model.parameters()]).tolist()


def plain(step: Callable[..., None], make: Callable[[], TorchTask], steps: int) -> list[float]:
    """Weights after a loop written by hand."""
    torch.manual_seed(3)
    task = make()
    for number, batch in enumerate(global_batches(steps)):
        step(task, {name: torch.from_numpy(array.copy()) for name, array in batch.items()}, number)
    models = task.model.values() if isinstance(task.model, Mapping) else [task.model]
    return torch.cat([one.detach().flatten() for model in models for one in model.parameters()]).tolist()


def plain_gan(task: TorchTask, batch: dict[str, Tensor], number: int) -> None:
    """Do what ``gan_step`` does."""
    generator, discriminator = task.model["generator"], task.model["discriminator"]
    task.optimizer["discriminator"].zero_grad()
    (real(discriminator(batch["x"])) + made_up(discriminator(generator(batch["z"]).detach()))).backward()
    task.optimizer["discriminator"].step()
    if number % 2 == 0:
        task.optimizer["generator"].zero_grad()
        real(discriminator(generator(batch["z"]))).backward()
        task.optimizer["generator"].step()


def plain_pairs(task: TorchTask, batch: dict[str, Tensor], number: int) -> None:
    """Do what ``whole_step`` and ``own_rows_step`` do."""
    task.optimizer.zero_grad()
    pair_loss(task.model(batch["x"]), task.model(batch["view"])).backward()
    task.optimizer.step()


def plain_weighted(task: TorchTask, batch: dict[str, Tensor], number: int) -> None:
    """Do what ``weighted_step`` does."""
    task.optimizer.zero_grad()
    weighing = batch["x"][:, 0].abs() * (batch["x"][:, 1] > 0)
    errors = (task.model(batch["x"]) - batch["view"]).square().mean(1)
    ((errors * weighing).sum() / weighing.sum()).backward()
    task.optimizer.step()

"""Small PyTorch models, losses and data for tests, and a framework around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.backends.torch.state.optimizer import joined
from hpctrain.backends.torch.task.opening import open_torch
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.comm.world import World
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import IntervalClock
from tests.tasks.points import GLOBAL_BATCH, Batch, cut, in_batches, samples


def global_batches(count: int) -> Iterator[Batch]:
    """Global batches of all fields."""
    return in_batches(samples(), count)


def plain_model() -> nn.Module:
    """A model in which nothing depends on the rank."""
    return nn.Sequential(nn.Linear(12, 31), nn.Tanh(), nn.Linear(31, 16), nn.ReLU(), nn.Linear(16, 3))


def noisy_model() -> nn.Module:
    """A model with dropout and BatchNorm, so that each rank has its own noise and statistics."""
    return nn.Sequential(nn.Linear(12, 31), nn.BatchNorm1d(31), nn.ReLU(), nn.Dropout(0.3), nn.Linear(31, 3))


def normalised_model() -> nn.Module:
    """A float64 model with several kinds of BatchNorm."""
    return nn.Sequential(
        *(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 6, 3)),
        *(nn.SyncBatchNorm(6, momentum=None), nn.Flatten(), nn.BatchNorm1d(12, affine=False), nn.Linear(12, 3)),
    ).double()


def in_float64(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Outputs for the points in double precision."""
    outputs: Tensor = model(batch["x"].double())
    return outputs


class Words(nn.Module):
    """A model with a sparse embedding and an unused parameter."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=sparse)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits from the mean embedding of the words."""
        logits: Tensor = self.head(self.embedding(batch["words"]).mean(1))
        return logits


def mean_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return functional.cross_entropy(outputs, batch["y"])


def weighted_loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy, as (sum, weight); some samples have weight 0."""
    losses = functional.cross_entropy(outputs, batch["y"], reduction="none")
    return (losses * batch["w"]).sum(), batch["w"].sum()


def accuracy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Fraction of correct predictions."""
    return (outputs.argmax(1) == batch["y"]).float().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def words_forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Outputs of Words, which takes the batch."""
    outputs: Tensor = model(batch)
    return outputs


class Together(torch.optim.Optimizer):
    """Several optimizers as one."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([group for one in inner for group in one.param_groups], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer."""
        for one in self.inner:
            one.step()


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD without momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Adagrad, which supports sparse gradients and has state."""
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    """SparseAdam for the table of Words, and AdamW for the rest."""
    rest = [parameter for name, parameter in model.named_parameters() if name != "embedding.weight"]
    return Together(torch.optim.SparseAdam([model.embedding.weight], lr=0.05), torch.optim.AdamW(rest, lr=0.01))


def make_framework(
    world: World,
    model: Callable[[], nn.Module] = plain_model,
    loss: Callable[..., Any] = mean_loss,
    optimizer: Callable[[nn.Module], Any] = sgd,
    forward: Callable[..., Any] | None = None,
    way: str | None = None,
    choice: Callable[[ReduceConfig, World, str | None], ReducerChoice] = ReducerChoice,
    reduce: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    parallel: ParallelConfig | None = None,
    **train: Any,
) -> TorchFramework:
    """A framework around a new model with the same initial weights everywhere; ``way`` names one candidate.

    Without it, nothing is measured either, unless ``reduce`` says auto: that takes longer than most trainings here.
    """
    measures = world.size == 1 or way or choice is not ReducerChoice or parallel
    kind = "auto" if measures else "mpi"
    torch.manual_seed(3)
    made = model()
    more = {} if forward is None else {"forward": forward}
    judges, held = metrics or {"accuracy": accuracy}, state or {}
    task = TorchTask(made, loss, joined(optimizer(made)), None, metrics=judges, state=held, **more)
    config = Config(
        name="test",
        task="a:b",
        seed=11,
        train=TrainConfig(steps=1, global_batch=GLOBAL_BATCH, **train),
        reduce=ReduceConfig(**{"kind": kind, "bucket_bytes": 1024, **(reduce or {})}),
        parallel=parallel or ParallelConfig(),
    )
    return open_torch(task, world, config, IntervalClock(), choice(config.reduce, world, way))


def train(framework: TorchFramework, steps: int, accumulate: int = 1) -> list[float]:
    """Train, and return the mean loss of each global batch before its update."""
    group = framework.world.data
    losses = []
    for batch in global_batches(steps):
        result = framework.step(cut(batch, group.rank, group.size, accumulate), len(batch["x"]))
        total, weight = group.sum(np.array(result.sums()["loss"]), "average the loss")
        losses.append(float(total / weight))
    return losses


def freeze_and_thaw(framework: TorchFramework) -> NDArray[Any]:
    """Weights after updates during some of which, including the first, the first layer is frozen."""
    group = framework.world.data
    for step, batch in enumerate(global_batches(8)):
        framework.model[0].requires_grad_(step not in (0, 1, 4, 5))
        framework.step(cut(batch, group.rank, group.size), len(batch["x"]))
    weights = torch.cat([one.detach().flatten() for one in framework.model.parameters()])
    framework.close()
    return weights.numpy()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with weight decay and momentum, which moves every parameter that has a gradient, even if it is zero."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

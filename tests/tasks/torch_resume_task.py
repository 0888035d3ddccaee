"""PyTorch tasks to resume: dropout, batch normalisation, augmentation, every random generator, state everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.stateful import PerRank
from tests.support.checkpoint_data import augment, data, global_noise


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, with noise."""
    return functional.cross_entropy(logits, batch["y"]) * (global_noise() if logits.requires_grad else 1)


def task(optimizer: str = "adam") -> TorchTask:
    """A task with dropout, batch normalisation, augmentation and global random numbers."""
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    make = {"adam": torch.optim.AdamW, "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True)}
    return TorchTask(model, loss, make[optimizer](model.parameters(), lr=0.01), data(), data(40), transform=augment)


def plain() -> TorchTask:
    """A task without per-rank noise or statistics."""
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))
    return TorchTask(
        model,
        lambda logits, batch: functional.cross_entropy(logits, batch["y"]),
        torch.optim.Adam(model.parameters(), lr=0.01),
        data(),
        transform=augment,
    )


class Count:
    """A number with ``state_dict`` and ``load_state_dict``."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        """See Stateful."""
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """See Stateful."""
        self.value = saved["value"]


class Both(torch.optim.Optimizer):
    """An optimizer made of others, with a count as state of its own."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([group for one in inner for group in one.param_groups], {})
        self.inner = inner
        self.count = Count()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Step the inner optimizers, and apply some decay."""
        self.count.value += 1
        for one in self.inner:
            one.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1e-3 / self.count.value)


class Centred(nn.Module):
    """A loss that keeps a running mean of the logits."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.calls = Count()

    def forward(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy of the centred logits, scaled by the number of calls."""
        if logits.requires_grad:
            self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
            self.calls.value += 1
        return functional.cross_entropy(logits - self.center, batch["y"]) * (1 + 1 / (1 + self.calls.value))


class Scaled(nn.Module):
    """Counts its calls in extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the inputs by a factor that falls with each call."""
        self.calls += x.requires_grad
        return x * (1 + 1 / (1 + self.calls))

    def get_extra_state(self) -> dict[str, int]:
        """See Module."""
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """See Module."""
        self.calls = state["calls"]


class Lanes:
    """A loss that remembers the last logits of each rank's samples, and a count equal on all ranks."""

    def __init__(self) -> None:
        self.last: torch.Tensor | None = None
        self.count = 0

    def __call__(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy, shifted by the remembered logits."""
        shift = 0.0 if self.last is None else self.last
        if logits.requires_grad:
            self.last = logits.detach().mean(0)
            self.count += 1
        return functional.cross_entropy(logits - 0.1 * shift, batch["y"])

    def state_dict(self) -> dict[str, object]:
        """See PerRank."""
        return {"last": self.last, "count": self.count, "note": "x" * self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See PerRank."""
        assert saved["note"] == "x" * saved["count"]
        self.last, self.count = saved["last"], saved["count"]


class Level:
    """A number that rises with each step, equally on all ranks."""

    def __init__(self) -> None:
        self.level = 0.0

    def state_dict(self) -> dict[str, object]:
        """See Stateful."""
        return {"level": self.level, "names": ["a", None]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """See Stateful."""
        self.level = saved["level"]


def declared() -> TorchTask:
    """A task that declares per-rank and shared state."""
    made, lanes, level = plain(), Lanes(), Level()

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        level.level += 0.25 * logits.requires_grad
        return lanes(logits, batch) * (1 + level.level)

    state = {"lanes": PerRank(lanes), "level": level}
    return TorchTask(made.model, loss, made.optimizer, data(), transform=augment, state=state)


def unwrapped() -> TorchTask:
    """A task that declares per-rank state without PerRank."""
    made, lanes = plain(), Lanes()
    return TorchTask(made.model, lanes, made.optimizer, data(), state={"lanes": lanes})


def holding() -> TorchTask:
    """A task with state in the optimizer's parts, in the loss, and in the model's extra state."""
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), Scaled(), nn.Linear(32, 3))
    parameters = list(model.parameters())
    adam, sgd = torch.optim.Adam(parameters[:2], lr=0.01), torch.optim.SGD(parameters[2:], lr=0.01, momentum=0.9)
    return TorchTask(model, Centred(), Both(adam, sgd), data(), data(40), transform=augment)


def drawing() -> TorchTask:
    """A task whose loss is a random number, whatever the model does."""
    made = plain()
    return TorchTask(made.model, lambda logits, batch: 0 * logits.sum() + torch.rand(()), made.optimizer, data())


def unequal(world: World) -> TorchTask:
    """A task in which rank 1 overwrites its weights unnoticed."""
    made = plain()

    def overwrite(module: nn.Module, inputs: object, outputs: object) -> None:
        made.model[0].bias.data.add_(1)

    if world.rank == 1:
        made.model.register_forward_hook(overwrite)
    return made

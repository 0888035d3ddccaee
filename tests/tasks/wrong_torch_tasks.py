"""PyTorch tasks with one mistake each, as beginners make them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpctrain.tasks.definition import TorchScheduler, TorchTask


class NoForward(nn.Module):
    """A model without ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)


class NoReturn(nn.Module):
    """A model whose ``forward`` returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> None:
        """Discard the layer's outputs."""
        self.layer(x)


def swapped(batch: Any, outputs: Any) -> Any:
    """A loss with its arguments in the wrong order."""
    return functional.cross_entropy(outputs, batch["y"])


def forgets(outputs: Any, batch: Any) -> None:
    """A loss that returns nothing."""
    functional.cross_entropy(outputs, batch["y"])


def broken_metric(outputs: Any, batch: Any) -> Any:
    """A metric that uses a name not in the batch."""
    return (outputs.argmax(1) == batch["label"]).float().mean()


def loss(outputs: Any, batch: Any) -> Any:
    """A correct loss."""
    return functional.cross_entropy(outputs, batch["y"])


def step(ctx: Any, batch: Any) -> None:
    """A step that uses arrays missing from the validation data."""
    ctx.backward(loss(ctx.model(batch["x"]), batch))
    ctx.update()


def made(**changes: Any) -> TorchTask:
    """A task that works, except for the changes."""
    random = np.random.default_rng(3)
    data = {"x": random.normal(size=(40, 4)).astype(np.float32), "y": random.integers(0, 3, 40)}
    model = changes.pop("model", None) or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if isinstance(model, nn.Module) else None
    return dataclasses.replace(TorchTask(model, loss, optimizer, data, data), **changes)


def three() -> dict[str, Any]:
    """Samples with three arrays."""
    x = np.ones((40, 4), np.float32)
    return {"x": x, "y": x[:, 0], "w": x[:, 0]}


def steps_of(model: nn.Module) -> Any:
    """A scheduler, where a function that makes one is expected."""
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 10)


def column() -> dict[str, Any]:
    """Targets of shape [n], for outputs of shape [n, 1]."""
    x = np.ones((40, 4), np.float32)
    return {"x": x, "y": x[:, 0]}


def data(**changes: Any) -> dict[str, Any]:
    """Samples that fit, except for the changes."""
    random = np.random.default_rng(3)
    return {"x": random.normal(size=(40, 4)).astype(np.float32), "y": random.integers(0, 3, 40)} | changes


class NoSuper(nn.Module):
    """A model that does not call ``super().__init__``."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 3)


class Unregistered(nn.Module):
    """A model whose layers are in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 3)]


class DictOutputs(nn.Linear):
    """A model that returns its outputs by name."""

    def forward(self, x: torch.Tensor) -> Any:
        """The layer's outputs."""
        return {"logits": super().forward(x)}


def of_horovod() -> torch.optim.Optimizer:
    """An optimizer of a class that Horovod has extended."""

    def synchronize(self: Any) -> None: ...

    synchronize.__module__ = "horovod.torch.optimizer"
    return type("SGD", (torch.optim.SGD,), {"synchronize": synchronize})(nn.Linear(4, 3).parameters(), 0.1)  # type: ignore[no-any-return]


def backward(outputs: Any, batch: Any) -> Any:
    """A loss that calls ``backward``."""
    total = loss(outputs, batch)
    total.backward()
    return total


class Two(nn.Module):
    """A model that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's outputs, and the inputs."""
        return self.layer(x), x


class Away(nn.Linear):
    """A model that moves its inputs itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Move the inputs to the GPU first."""
        return super().forward(x.cuda())


def twice(model: nn.Module) -> TorchTask:
    """A task with two optimizers of the same parameters."""
    return made(model=model, optimizer=[torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)])


WRONG: dict[str, Any] = {
    "no_train": lambda: TorchTask(nn.Linear(4, 3), loss, torch.optim.SGD([torch.ones(1)])),
    "no_loss": lambda: made(loss=None),
    "no_optimizer": lambda: made(optimizer=None),
    "optimizer_name": lambda: made(optimizer="adam"),
    "optimizers_none": lambda: made(optimizer=[]),
    "optimizers_other": lambda: made(optimizer=[torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1), "adam"]),
    "optimizers_twice": lambda: twice(nn.Linear(4, 3)),
    "other_parameters": lambda: made(optimizer=torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)),
    "frozen": lambda: made(model=nn.Linear(4, 3).requires_grad_(False)),
    "unregistered": lambda: made(optimizer=torch.optim.SGD(Unregistered().parameters(), 0.1)),
    "horovod": lambda: made(optimizer=of_horovod()),
    "callbacks": lambda: TorchTask(nn.Linear(4, 3), loss, None, callbacks=[]),  # type: ignore[call-arg]
    "scripted": lambda: made(model=torch.jit.script(nn.Linear(4, 3))),
    "halves": lambda: made(model=nn.Linear(4, 3).half()),
    "dict_outputs": lambda: made(model=DictOutputs(4, 3), loss="cross_entropy"),
    "backward": lambda: made(loss=backward),
    "no_super": lambda: made(model=NoSuper()),
    "lazy": lambda: made(model=nn.LazyLinear(3)),
    "two_outputs": lambda: made(model=Two()),
    "cuda": lambda: made(model=Away(4, 3)),
    "misspelt": lambda: TorchTask(nn.Linear(4, 3), loss, optimiser=None),  # type: ignore[call-arg]
    "keras_model_fields": lambda: TorchTask(nn.Linear(4, 3), loss, None, data(), fit_data=None),  # type: ignore[call-arg]
    "not_a_task": lambda: nn.Linear(4, 3),
    "lengths": lambda: made(train=data(y=np.zeros(39, np.int64))),
    "lists": lambda: made(train={"x": [[1.0, 2.0]], "y": [0]}),
    "pair": lambda: made(train=(data()["x"], data()["y"])),
    "words": lambda: made(train=data(y=np.array(["cat"] * 40))),
    "empty": lambda: made(train={"x": np.ones((0, 4), np.float32), "y": np.ones(0, np.int64)}),
    "loader": lambda: made(train=torch.utils.data.DataLoader([1, 2])),  # type: ignore[arg-type]
    "no_file": lambda: made(train="train.h5"),
    "float64": lambda: made(train=data(x=np.ones((40, 4)))),
    "float_labels": lambda: made(train=data(y=np.ones(40, np.float32))),
    "labels": lambda: made(train=data(y=np.full(40, 3))),
    "dict_loss": lambda: made(loss=lambda outputs, batch: {"loss": loss(outputs, batch)}),
    "three_values": lambda: made(loss=lambda outputs, batch: (loss(outputs, batch), 1.0, 2.0)),
    "one_argument": lambda: made(loss=lambda outputs: outputs.mean()),
    "forward_of_batch": lambda: made(forward=lambda batch: batch["x"]),
    "metrics_list": lambda: made(metrics=[broken_metric]),
    "metric_swapped": lambda: made(
        metrics={"accuracy": lambda batch, outputs: (outputs.argmax(1) == batch["y"]).float().mean()}
    ),
    "transform": lambda: made(transform=lambda sample: sample),
    "transform_none": lambda: made(transform=lambda sample, rng: None),
    "collate": lambda: made(collate=lambda samples: samples),
    "sampler": lambda: made(sampler=[0, 1, 2]),
    "schedule": lambda: made(schedule="cosine"),
    "scheduler": lambda: made(schedule=TorchScheduler(steps_of(nn.Linear(1, 1)))),
    "tensor_list": lambda: made(tensor=["0"]),
    "layers_list": lambda: made(layers=[nn.Linear(4, 3)]),
    "hooks": lambda: made(hooks=NoForward()),
    "no_forward": lambda: made(model=NoForward()),
    "no_return": lambda: made(model=NoReturn()),
    "wide": lambda: made(model=nn.Linear(5, 3)),
    "swapped": lambda: made(loss=swapped),
    "forgets": lambda: made(loss=forgets),
    "each": lambda: made(loss=lambda outputs, batch: functional.cross_entropy(outputs, batch["y"], reduction="none")),
    "complex": lambda: made(loss=lambda outputs, batch: torch.fft.fft(outputs).mean()),
    "item": lambda: made(loss=lambda outputs, batch: loss(outputs, batch).item()),
    "argmax": lambda: made(loss=lambda outputs, batch: (outputs.argmax(1) != batch["y"]).float().mean()),
    "name": lambda: made(loss="cross_entrpy"),
    "class": lambda: made(loss=nn.CrossEntropyLoss),
    "sum": lambda: made(loss=nn.CrossEntropyLoss(reduction="sum")),
    "three_arrays": lambda: made(loss="mse", train=three()),
    "broadcast": lambda: made(model=nn.Linear(4, 1), loss="mse", train=column(), validation=None),
    "number": lambda: made(loss=3),
    "metric": lambda: made(metrics={"accuracy": broken_metric}),
    "metric_class": lambda: made(metrics={"accuracy": nn.L1Loss}),
    "metric_of_samples": lambda: made(metrics={"wrong": lambda outputs, batch: outputs.argmax(1) != batch["y"]}),
    "validation_names": lambda: made(validation={"x": data()["x"], "label": data()["y"]}),
    "optimizer_class": lambda: made(optimizer=torch.optim.Adam),
    "model_class": lambda: dataclasses.replace(made(), model=NoForward),
}
RIGHT: dict[str, Any] = {
    "validation_only": lambda: made(
        loss=None,
        step=step,
        validation={"x": data()["x"], "label": data()["y"]},
        metrics={"accuracy": broken_metric},  # which fits here
    ),
    "cross_entropy": lambda: made(loss="cross_entropy"),
    "object": lambda: made(loss=nn.CrossEntropyLoss()),
    "weighted": lambda: made(loss=nn.CrossEntropyLoss(torch.ones(3))),
    "function": lambda: made(loss=functional.cross_entropy),
    "own": made,
}


def task(which: str) -> TorchTask:
    """The task with this name."""
    made: TorchTask = (WRONG | RIGHT)[which]()
    return made

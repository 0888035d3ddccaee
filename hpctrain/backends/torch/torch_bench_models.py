"""PyTorch models for ``hpctrain bench step``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.backends.torch.task.opening import open_torch
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.comm.world import World
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.tasks.torch_chartext import GPT
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import HostBatch, StepSettings


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    """GPT with six blocks of width 256; 4.9 M parameters, 4 sequences of 64 tokens."""
    tokens = torch.randint(256, (4, 65))
    return GPT(256, 256, 6, 4, 64), tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """MLP 784-2048-2048-10; 5.8 M parameters, 64 samples."""
    layers = [nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    return nn.Sequential(*layers), torch.randn(64, 784), torch.randint(10, (64,))


def conv() -> tuple[nn.Module, Tensor, Tensor]:
    """CNN with four blocks of convolution, BatchNorm and ReLU; 0.4 M parameters, 64 images of 32 x 32."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((3, 32, 64, 128, 256)):
        convolution = nn.Conv2d(a, b, 3, stride=1 if a == 3 else 2, padding=1, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(b), nn.ReLU()))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {"gpt": gpt, "mlp": mlp, "conv": conv}


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    """Cross-entropy, mean over the samples."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), batch["target"])


@dataclass(frozen=True)
class TorchBenchProblem:
    """A model and this rank's samples."""

    model: nn.Module
    optimizer: Any
    inputs: Tensor
    targets: Tensor
    tensor: Mapping[str, Any] = field(default_factory=dict)
    """See TorchTask."""

    @property
    def batch(self) -> HostBatch:
        return {"input": self.inputs.numpy(), "target": self.targets.numpy()}

    def open(self, world: World, config: StepSettings, choice: ReducerChoice) -> TorchFramework:
        task = TorchTask(self.model, cross_entropy, self.optimizer, None, tensor=self.tensor)
        return open_torch(task, world, config, IntervalClock(), choice)


def seeded(make: Callable[[], tuple[nn.Module, Tensor, Tensor]], world: World) -> tuple[nn.Module, Tensor, Tensor]:
    """Makes a model with equal weights on all ranks, and this rank's inputs and targets."""
    torch.manual_seed(0)
    model, _, _ = make()
    torch.manual_seed(1 + world.rank)
    return model, *make()[1:]


def problem(name: str, world: World) -> TorchBenchProblem:
    """Makes one of MODELS with SGD."""
    model, inputs, targets = seeded(MODELS[name], world)
    return TorchBenchProblem(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), inputs, targets)

"""Further PyTorch models for ``benchmarks.step``, and contenders without hpctrain."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.backends.torch import torch_bench_models
from hpctrain.backends.torch.process_groups import ends_calmly
from hpctrain.backends.torch.state.optimizer import Together
from hpctrain.backends.torch.state.tensors import digest
from hpctrain.backends.torch.torch_bench_models import TorchBenchProblem, cross_entropy, seeded
from hpctrain.comm.world import World
from hpctrain.tasks.definition import vocabulary

ROWS = 500_000
"""Rows of the embedding table."""


class Tables(nn.Module):
    """An embedding table of 500,000 x 16, eight rows per sample, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 16, sparse=True)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.layers(self.table(ids).mean(1))
        return logits


class Recurrent(nn.Module):
    """LSTM with two layers of 256; 0.9 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(64, 256, 2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.head(self.recurrent(x)[0][:, -1])
        return logits


class Residual(nn.Module):
    """Block of ResNet-18 (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *convolution(inputs, outputs, 3, stride), nn.ReLU(), *convolution(outputs, outputs, 3)
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the path to the shortcut."""
        return torch.relu(self.path(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its BatchNorm."""
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


def lstm() -> tuple[nn.Module, Tensor, Tensor]:
    """The LSTM over 32 steps, 32 samples."""
    return Recurrent(), torch.randn(32, 32, 64), torch.randint(10, (32,))


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    """ResNet-18 for 8 images of 32 x 32; 11 M parameters."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Residual(a, b, 1 + (a != b)) for a, b in itertools.pairwise(widths)]
    layers = [*convolution(3, 64, 3), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def small() -> tuple[nn.Module, Tensor, Tensor]:
    """100 layers of width 32; 0.1 M parameters in 202 tensors."""
    layers = [layer for _ in range(100) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 10)), torch.randn(64, 32), torch.randint(10, (64,))


def wide() -> tuple[nn.Module, Tensor, Tensor]:
    """MLP 1024-4096-4096-10; 21 M parameters."""
    layers = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)]
    return nn.Sequential(*layers), torch.randn(64, 1024), torch.randint(10, (64,))


def tables() -> tuple[nn.Module, Tensor, Tensor]:
    """The model with 512 samples."""
    return Tables(), torch.randint(ROWS, (512, 8)), torch.randint(10, (512,))


MODELS = {"lstm": lstm, "resnet": resnet, "small": small, "wide": wide, "mlp-adam": torch_bench_models.mlp}


def optimizer_of(name: str, model: nn.Module, dense: bool) -> torch.optim.Optimizer:
    """The optimizer of a model; for dense gradients Adam replaces SparseAdam, which does not accept them."""
    if name == "tables-sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "tables-adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=1e-3)
    if name == "mlp-adam":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not isinstance(model, Tables):
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if dense:
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    rest = torch.optim.Adam(model.layers.parameters(), lr=1e-3)
    return Together([torch.optim.SparseAdam(model.table.parameters(), lr=1e-3), rest])


def problem(name: str, world: World, dense: bool = False) -> TorchBenchProblem:
    """Makes a model of the package, one of MODELS, or a large table with the named optimizer."""
    if name in torch_bench_models.MODELS:
        return torch_bench_models.problem(name, world)
    model, inputs, targets = seeded(MODELS.get(name, tables), world)
    cut = {"table": vocabulary} if isinstance(model, Tables) else {}
    return TorchBenchProblem(model, optimizer_of(name, model, dense), inputs, targets, cut)


class Plain:
    """A loop as in PyTorch's documentation."""

    def __init__(
        self, problem: TorchBenchProblem, model: Any, optimizer: Any, close: Callable[[], None] = lambda: None
    ) -> None:
        self.problem, self.model, self.optimizer, self.close = problem, model, optimizer, close

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.problem.inputs), {"target": self.problem.targets}).backward()
        self.optimizer.step()

    def weights_hash(self) -> str:
        return digest(list(self.problem.model.parameters()))


def plain(problem: TorchBenchProblem) -> Plain:
    """A loop without any exchange."""
    return Plain(problem, problem.model, problem.optimizer)


def distributed_data_parallel(problem: TorchBenchProblem, fp16: bool = False) -> Plain:
    """DistributedDataParallel over gloo, optionally with its hook for fp16 compression."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(problem.model)
    if fp16:
        model.register_comm_hook(None, fp16_compress_hook)
    return Plain(problem, model, problem.optimizer)


def zero_redundancy(problem: TorchBenchProblem) -> Plain:
    """DistributedDataParallel with PyTorch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings = {key: value for key, value in problem.optimizer.param_groups[0].items() if key in ("lr", "momentum")}
    model = nn.parallel.DistributedDataParallel(problem.model)
    return Plain(problem, model, ZeroRedundancyOptimizer(model.parameters(), type(problem.optimizer), **settings))


def plain_horovod(problem: TorchBenchProblem) -> Plain:
    """Horovod's DistributedOptimizer with default settings."""
    import horovod.torch as hvd

    hvd.init()

    optimizer = hvd.DistributedOptimizer(problem.optimizer, named_parameters=problem.model.named_parameters())
    return Plain(problem, problem.model, optimizer, hvd.shutdown)


def join_gloo(world: World) -> None:
    """Opens a gloo process group for DistributedDataParallel; MASTER_ADDR overrides rank 0's host name."""
    free = socket.create_server(("", 0))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1" if world.nodes == 1 else world.host)
    where = world.everyone.broadcast([address, free.getsockname()[1]], "find rank 0")
    free.close()
    store = torch.distributed.TCPStore(where[0], where[1], world.size, is_master=world.rank == 0)
    ends_calmly()
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def others(names: Sequence[str], world: World) -> dict[str, Callable[[str], Plain]]:
    """Contenders by name, made from a model's name. Collective."""
    if {"ddp", "ddp-fp16", "zero"} & set(names):
        join_gloo(world)
    return {
        "plain": lambda model: plain(problem(model, world)),
        "ddp": lambda model: distributed_data_parallel(problem(model, world)),
        "ddp-fp16": lambda model: distributed_data_parallel(problem(model, world), fp16=True),
        "zero": lambda model: zero_redundancy(problem(model, world)),
        "horovod-plain": lambda model: plain_horovod(problem(model, world)),
    }

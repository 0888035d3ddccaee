"""Further PyTorch models for ``benchmarks.step``, and contenders without hpctrain."""

from __future__ import annotations

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


def tables() -> tuple[nn.Module, Tensor, Tensor]:
    """The model with 512 samples."""
    return Tables(), torch.randint(ROWS, (512, 8)), torch.randint(10, (512,))


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
    """Makes a model of the package, or one with another optimizer or a large table."""
    if name in torch_bench_models.MODELS:
        return torch_bench_models.problem(name, world)
    model, inputs, targets = seeded(torch_bench_models.mlp if name == "mlp-adam" else tables, world)
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

    os.environ["HOROVOD_CYCLE_TIME"] = "1"  # the default; an earlier start in this process may have set another value
    hvd.init()

    def close() -> None:
        hvd.shutdown()
        del os.environ["HOROVOD_CYCLE_TIME"]

    optimizer = hvd.DistributedOptimizer(problem.optimizer, named_parameters=problem.model.named_parameters())
    return Plain(problem, problem.model, optimizer, close)


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

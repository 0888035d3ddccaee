"""Steps of torch models with each way of exchanging gradients, in turns, on the ranks that run this program."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.bench.ranks import write_rows
from hpctrain.bench.step import TABLES, Row, parser_of_ranks, rows
from hpctrain.bench.turns import Contender, take_turns
from hpctrain.comm.world import World, alone, connect
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.frameworks.torch.opening import open_torch
from hpctrain.frameworks.torch.optimizer import Together
from hpctrain.frameworks.torch.state import digest
from hpctrain.parallel.tensor_words import vocabulary
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.tasks.torch_chartext import GPT
from hpctrain.train.clock import IntervalClock

Shard: TypeAlias = Literal["none", "optimizer", "tables"]
ROWS = 500_000
"""Of the table."""


class Conv(nn.Sequential):
    """Four blocks of convolution, BatchNorm and ReLU; 0.4 M parameters."""

    def __init__(self) -> None:
        widths = (3, 32, 64, 128, 256)
        blocks = [
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=1 if a == 3 else 2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()
            )
            for a, b in itertools.pairwise(widths)
        ]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    """Six blocks of width 256: 4.9 M parameters, 4 sequences of 64 tokens."""
    tokens = torch.randint(256, (4, 65))
    return GPT(256, 256, 6, 4, 64), tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """784-2048-2048-10: 5.8 M parameters, 64 samples."""
    layers = [nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    return nn.Sequential(*layers), torch.randn(64, 784), torch.randint(10, (64,))


def conv() -> tuple[nn.Module, Tensor, Tensor]:
    """Four blocks, 64 images of 32 x 32."""
    return Conv(), torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


class Tables(nn.Module):
    """A table of 500,000 x 16, eight rows of which make a sample, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 16, sparse=True)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, ids: Tensor) -> Tensor:
        """Classes."""
        logits: Tensor = self.layers(self.table(ids).mean(1))
        return logits


def tables() -> tuple[nn.Module, Tensor, Tensor]:
    """512 samples."""
    return Tables(), torch.randint(ROWS, (512, 8)), torch.randint(10, (512,))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "gpt": gpt,
    "mlp": mlp,
    "conv": conv,
    "mlp-adam": mlp,
    **dict.fromkeys(TABLES, tables),
}


def optimizer_of(name: str, model: nn.Module, densify: bool) -> torch.optim.Optimizer:
    """Of a model; SparseAdam takes no dense gradients, so that Adam is in its place if they are made dense."""
    if name == "tables-sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "tables-adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=1e-3)
    if name == "mlp-adam":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not isinstance(model, Tables):
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if densify:
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    rest = torch.optim.Adam(model.layers.parameters(), lr=1e-3)
    return Together([torch.optim.SparseAdam(model.table.parameters(), lr=1e-3), rest])


class BenchModel:
    """A model on this rank's samples."""

    def __init__(self, model: str, world: World, densify: bool = False) -> None:
        torch.manual_seed(0)
        self.model, _, _ = MODELS[model]()
        torch.manual_seed(1 + world.rank)
        _, self.inputs, self.targets = MODELS[model]()
        self.optimizer: Any = optimizer_of(model, self.model, densify)

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean over this rank's samples."""
        return cross_entropy(model(self.inputs), {"target": self.targets})

    def weights_hash(self) -> str:
        return digest(list(self.model.parameters()))


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    """Mean over the samples."""
    return functional.cross_entropy(outputs.flatten(0, -2), batch["target"])


class Ours:
    """hpctrain's own step, as the training loop calls it."""

    def __init__(
        self, problem: BenchModel, world: World, reduce: ReduceConfig, chosen: str | None, shard: Shard = "none"
    ) -> None:
        task = TorchTask(problem.model, cross_entropy, problem.optimizer, None, tensor={"table": vocabulary})
        self.batch = {"input": problem.inputs.numpy(), "target": problem.targets.numpy()}
        self.samples = len(problem.inputs) * world.size
        train = TrainConfig(steps=1, global_batch=self.samples)
        parallel = ParallelConfig(shard=shard)
        config = Config(name="bench", task="bench:step", train=train, reduce=reduce, parallel=parallel)
        self.framework = open_torch(task, world, config, IntervalClock(), ReducerChoice(reduce, world, chosen))
        self.weights_hash, self.close = self.framework.weights_hash, self.framework.close

    def step(self) -> None:
        self.framework.set_learning_rate(1.0)
        self.framework.step([self.batch], self.samples)


class Plain:
    """A loop as its documentation shows it."""

    def __init__(
        self, problem: BenchModel, model: Any, optimizer: Any, close: Callable[[], None] = lambda: None
    ) -> None:
        self.problem, self.model, self.optimizer, self.close = problem, model, optimizer, close

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.problem.loss(self.model).backward()
        self.optimizer.step()

    def weights_hash(self) -> str:
        return self.problem.weights_hash()


def distributed_data_parallel(problem: BenchModel) -> Plain:
    """torch's own, over gloo."""
    return Plain(problem, nn.parallel.DistributedDataParallel(problem.model), problem.optimizer)


def zero_redundancy(problem: BenchModel) -> Plain:
    """The same with torch's own sharded optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings = {key: value for key, value in problem.optimizer.param_groups[0].items() if key in ("lr", "momentum")}
    model = nn.parallel.DistributedDataParallel(problem.model)
    return Plain(problem, model, ZeroRedundancyOptimizer(model.parameters(), type(problem.optimizer), **settings))


def plain_horovod(problem: BenchModel) -> Plain:
    """Horovod's DistributedOptimizer at its defaults."""
    import horovod.torch as hvd

    os.environ["HOROVOD_CYCLE_TIME"] = "1"  # its default; an earlier start in this process may have set another
    hvd.init()
    optimizer = hvd.DistributedOptimizer(problem.optimizer, named_parameters=problem.model.named_parameters())
    return Plain(problem, problem.model, optimizer, hvd.shutdown)


class Choices:
    """Makes contenders by name; what ``auto`` chose for a model is kept for its later turns."""

    def __init__(self, world: World, compression: str) -> None:
        self.world, self.compression = world, compression
        self.chosen: dict[str, str | None] = {}

    def make(self, contender: str, model: str) -> Contender:
        """A contender with a fresh model."""
        os.environ.pop("HOROVOD_CYCLE_TIME", None)
        problem = BenchModel(model, self.world, contender == "densify")
        if contender == "ddp":
            return distributed_data_parallel(problem)
        if contender == "zero":
            return zero_redundancy(problem)
        if contender == "sharded":
            return Ours(problem, self.world, ReduceConfig(), None, shard="optimizer")
        if contender == "tables":
            return Ours(problem, self.world, ReduceConfig(kind="mpi"), None, shard="tables")
        if contender == "horovod-plain":
            return plain_horovod(problem)
        if contender == "plain":
            return Plain(problem, problem.model, problem.optimizer)
        if contender == "none":
            return Ours(problem, alone(), ReduceConfig(), None)
        if contender == "auto":
            config = ReduceConfig(kind="auto", compression=self.compression)  # type: ignore[arg-type]
            ours = Ours(problem, self.world, config, self.chosen.get(model))
            ours.step()
            self.chosen[model] = ours.framework.reducer_name
            return ours
        if contender == "densify":
            return Ours(problem, self.world, ReduceConfig(kind="mpi", sparse="densify"), None)
        if contender in ("mpi", "horovod"):
            return Ours(problem, self.world, ReduceConfig(kind=contender), None)  # type: ignore[arg-type]
        return Ours(problem, self.world, ReduceConfig(), Candidate.parse(contender).name)


def compare(model: str, contenders: Sequence[str], choices: Choices, rounds: int, steps: int) -> list[Row]:
    """All contenders on one model, in turns."""
    times, equal = take_turns(contenders, lambda name: choices.make(name, model), rounds, steps, choices.world.data)
    return rows("torch", model, times, equal, choices.chosen.get(model))


def join_gloo(world: World) -> None:
    """A torch process group for DistributedDataParallel; MASTER_ADDR names rank 0 if its host name does not."""
    free = socket.create_server(("", 0))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1" if world.nodes == 1 else world.host)
    where = world.everyone.broadcast([address, free.getsockname()[1]], "find rank 0")
    free.close()
    store = torch.distributed.TCPStore(where[0], where[1], world.size, is_master=world.rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def main() -> None:
    """Rank 0 writes the rows."""
    args = parser_of_ranks().parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    world = connect()
    contenders = args.contenders.split(",")
    over_gloo = {"ddp", "zero"} & set(contenders)
    if over_gloo:
        join_gloo(world)
    choices = Choices(world, args.compression)
    found = [
        row for model in args.models.split(",") for row in compare(model, contenders, choices, args.rounds, args.steps)
    ]
    if world.rank == 0:
        write_rows(args.out, [asdict(row) for row in found])
    if over_gloo:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Steps of three torch models with each way of exchanging gradients, in turns, on the ranks that run this program."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.bench.ranks import write_rows
from hpctrain.bench.step import Row, parser_of_ranks, rows
from hpctrain.bench.turns import Contender, take_turns
from hpctrain.comm.world import World, connect
from hpctrain.config.sections import ReduceConfig
from hpctrain.frameworks.torch.state import digest
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.torch_reducer import NoReducer, Reducer, make_reducer, measured_reducer
from hpctrain.tasks.torch_chartext import GPT


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


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {"gpt": gpt, "mlp": mlp, "conv": conv}


class BenchModel:
    """A model on this rank's samples."""

    def __init__(self, model: str, world: World) -> None:
        torch.manual_seed(0)
        self.model, _, _ = MODELS[model]()
        torch.manual_seed(1 + world.rank)
        _, self.inputs, self.targets = MODELS[model]()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean over this rank's samples."""
        return functional.cross_entropy(model(self.inputs).flatten(0, -2), self.targets)

    def weights_hash(self) -> str:
        return digest(list(self.model.parameters()))


class Ours:
    """A reducer of ours."""

    def __init__(self, problem: BenchModel, reducer: Reducer, size: int) -> None:
        self.problem, self.reducer, self.size = problem, reducer, size

    def backward(self) -> None:
        """All but the update."""
        self.reducer.begin()
        loss = self.problem.loss(self.problem.model) / self.size
        loss.backward()
        self.reducer.exchange(loss.detach())

    def step(self) -> None:
        self.backward()
        self.problem.optimizer.step()

    def weights_hash(self) -> str:
        return self.problem.weights_hash()

    def close(self) -> None:
        self.reducer.close()


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
        self.chosen: dict[str, str] = {}

    def make(self, contender: str, model: str) -> Contender:
        """A contender with a fresh model."""
        os.environ.pop("HOROVOD_CYCLE_TIME", None)
        problem, size = BenchModel(model, self.world), self.world.data.size
        if contender == "none":
            return Ours(problem, NoReducer(list(problem.model.named_parameters())), 1)
        if contender == "ddp":
            return distributed_data_parallel(problem)
        if contender == "horovod-plain":
            return plain_horovod(problem)
        if contender == "auto":
            return Ours(problem, self._automatic(problem, model), size)
        if contender in ("mpi", "horovod"):
            config = ReduceConfig(kind=contender)  # type: ignore[arg-type]
            return Ours(problem, measured_reducer(config, self.world, problem.model, lambda reducer: None), size)
        return Ours(
            problem, make_reducer(Candidate.parse(contender), self.world.data, problem.model, ReduceConfig()), size
        )

    def _automatic(self, problem: BenchModel, model: str) -> Reducer:
        config = ReduceConfig(kind="auto", compression=self.compression)  # type: ignore[arg-type]
        reducer = measured_reducer(
            config,
            self.world,
            problem.model,
            lambda reducer: Ours(problem, reducer, self.world.data.size).backward(),
            self.chosen.get(model),
        )
        self.chosen[model] = reducer.name
        return reducer


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
    if "ddp" in contenders:
        join_gloo(world)
    choices = Choices(world, args.compression)
    found = [
        row for model in args.models.split(",") for row in compare(model, contenders, choices, args.rounds, args.steps)
    ]
    if world.rank == 0:
        write_rows(args.out, [asdict(row) for row in found])
    if "ddp" in contenders:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

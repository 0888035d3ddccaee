"""Program of ``benchmarks.parallel`` on the ranks: steps of a GPT under each plan, alternating, on the same samples."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.parallel import HEADS, MODELS, THEIRS, Row
from examples.gpt import Block, Gpt
from hpctrain.backends.torch.process_groups import DefaultGroup
from hpctrain.backends.torch.strategies.fsdp.layer_order import COMPARED_UPDATES
from hpctrain.backends.torch.strategies.tp_group import cross_entropy
from hpctrain.backends.torch.task.opening import open_torch
from hpctrain.bench.ranks import timed, write_rows
from hpctrain.comm.world import World, alone, connect, in_grid
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.data.order import part_of
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import TorchTask, columns, rows, vocabulary
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import StepSettings

WORDS, LENGTH = 256, 128
CUTS = {
    "words": vocabulary,
    "blocks.*.qkv": columns(heads=HEADS),
    "blocks.*.out": rows,
    "blocks.*.up": columns,
    "blocks.*.down": rows,
    "head": columns(classes=True),
}
PLANS: dict[str, dict[str, Any]] = {
    "mpi": {},
    "sharded": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "tensor": {"tensor": True},
    "pipeline": {"pipeline": True},
    "interleaved": {"pipeline": True, "pipeline_chunks": 2},
    "parameters": {"shard": "parameters"},
}
"""Keys of ``parallel``; True means all ranks."""


def gpt(size: str) -> Gpt:
    """Makes a GPT with fixed weights."""
    torch.manual_seed(0)
    width, count = MODELS[size]
    blocks = [Block(width, HEADS, HEADS, 4 * width, gated=False, norm=nn.LayerNorm) for _ in range(count)]
    return Gpt(WORDS, width, blocks, nn.LayerNorm, tied=False)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all contenders; DTensors do not allow fused or foreach optimizers with plain tensors."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def loss_of(logits: Any, batch: Any) -> Tensor:
    """Cross-entropy, mean over the tokens."""
    return cross_entropy(logits, batch["targets"])


class Ours:
    """hpctrain's step under a plan, or in one process on a single rank."""

    def __init__(self, size: str, batch: int, micro_batches: int, world: World, plan: dict[str, Any]) -> None:
        keys: dict[str, Any] = {key: world.size if value is True else value for key, value in plan.items()}
        parallel = ParallelConfig(**keys)
        self.accumulate = micro_batches if parallel.pipeline > 1 else 1
        self.world = in_grid(world, parallel.tensor, parallel.pipeline)
        train = TrainConfig(steps=1, global_batch=batch, accumulate=self.accumulate)
        reduce = ReduceConfig(kind="mpi" if plan == {} and world.size > 1 else "auto")
        config = Config(name="bench", task="bench:plan", train=train, reduce=reduce, parallel=parallel)
        model = gpt(size)
        task = TorchTask(model, loss_of, optimizer_of(model), None, tensor=CUTS, layers=lambda whole: whole.layers())
        choice = ReducerChoice(reduce, self.world)
        self.clock = IntervalClock()
        settings = StepSettings(train, parallel, reduce, used=config.features())
        self.framework = open_torch(task, self.world, settings, self.clock, choice)
        self.batch = batch
        self.mine = cut(samples(batch), self.world.data.rank, self.world.data.size, self.accumulate)
        self.loss = 0.0
        self.exchange: list[float] = []
        """Fraction of each step spent in the exchange."""
        self.close = self.framework.close

    def step(self) -> None:
        """One update."""
        self.clock.take()
        self.framework.set_learning_rate(1.0)
        result = self.framework.step(self.mine, self.batch)
        seconds = self.clock.take()
        self.exchange.append(seconds["exchange"] / sum(seconds.values()))
        total, weight = result.sums()["loss"]
        parts = self.world.data.allgather((total, weight), "add up the loss")
        self.loss = sum(part[0] for part in parts) / sum(part[1] for part in parts)

    def weights_hash(self) -> str:
        """Unused here: ranks hold different parts."""
        return ""


class Theirs:
    """A loop as in PyTorch's documentation, on this rank's samples."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], ranks: int) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.inputs, self.targets = (torch.from_numpy(batch[name]) for name in ("inputs", "targets"))
        self.loss = 0.0
        self.close = lambda: None

    def step(self) -> None:
        """One update."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        if self.ranks > 1:
            torch.distributed.all_reduce(total)
        self.loss = float(total) / self.ranks

    def weights_hash(self) -> str:
        """See Ours."""
        return ""


class TorchPipeline:
    """torch.distributed.pipelining with schedule 1F1B."""

    def __init__(self, size: str, batch: int, micro_batches: int, world: World) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        layers = gpt(size).layers()
        blocks = layers[1:-2]
        mine = [blocks[place] for place in range(len(blocks)) if place * world.size // len(blocks) == world.rank]
        first, last = world.rank == 0, world.rank == world.size - 1
        own = nn.Sequential(*(layers[:1] if first else []), *mine, *(layers[-2:] if last else []))
        self.optimizer = optimizer_of(own)
        stage = PipelineStage(own, world.rank, world.size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, micro_batches, loss_fn=cross_entropy)
        given = samples(batch)
        self.inputs = (torch.from_numpy(given["inputs"]),) if first else ()
        self.targets = torch.from_numpy(given["targets"]) if last else None
        self.loss = 0.0
        self.close = lambda: None

    def step(self) -> None:
        """One update."""
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        if self.targets is None:
            self.schedule.step(*self.inputs)
        else:
            self.schedule.step(*self.inputs, target=self.targets, losses=losses)
        self.optimizer.step()
        self.loss = float(torch.stack(losses).mean()) if losses else 0.0

    def weights_hash(self) -> str:
        """See Ours."""
        return ""


def samples(batch: int) -> dict[str, np.ndarray[Any, Any]]:
    """Fixed samples: int64[batch, LENGTH] inputs and targets."""
    tokens = np.random.default_rng(0).integers(0, WORDS, (batch, LENGTH + 1))
    return {"inputs": np.ascontiguousarray(tokens[:, :-1]), "targets": np.ascontiguousarray(tokens[:, 1:])}


def cut(whole: dict[str, Any], rank: int, size: int, pieces: int = 1) -> list[dict[str, Any]]:
    """Cuts out a rank's micro-batches."""
    mine = {name: array[part_of(len(array), rank, size)] for name, array in whole.items()}
    count = len(mine["inputs"])
    return [{name: array[part_of(count, piece, pieces)] for name, array in mine.items()} for piece in range(pieces)]


def tensor_parallel(model: Gpt, ranks: int) -> Gpt:
    """Applies tensor parallelism with DTensor, as in PyTorch's tutorial on transformers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for place in range(len(model.blocks)):
        plan |= {f"blocks.{place}.{name}": ColwiseParallel() for name in ("qkv", "up")}
        plan |= {f"blocks.{place}.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    return model


def fully_sharded(model: Gpt) -> Gpt:
    """Applies FSDP2 as in its documentation."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def of_torch(name: str, size: str, batch: int, micro_batches: int, world: World) -> Theirs | TorchPipeline:
    """Makes a contender of PyTorch's own, over gloo."""
    if name == "torch-pipeline":
        return TorchPipeline(size, batch, micro_batches, world)
    model: nn.Module = gpt(size)
    own = cut(samples(batch), world.rank, world.size)[0]
    if name == "dtensor":
        model = tensor_parallel(gpt(size), world.size)
        return Theirs(model, optimizer_of(model), samples(batch), 1)
    if name == "fsdp":
        model = fully_sharded(gpt(size))
        return Theirs(model, optimizer_of(model), own, world.size)
    model = nn.parallel.DistributedDataParallel(model)
    if name == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=False)
        return Theirs(model, sharded, own, world.size)
    return Theirs(model, optimizer_of(model), own, world.size)


def measure(names: Sequence[str], args: argparse.Namespace, world: World) -> list[Row]:
    """Runs contenders in turn. Single-process ones run on rank 0 while the others wait without using a core."""
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    exchange: dict[str, list[float]] = {name: [] for name in PLANS}
    for _ in range(args.rounds):
        for name in names:
            make = maker(name, args, world)
            if make is None:
                world.everyone.barrier("wait for one process", timeout_s=1800)
                continue
            if name == "one-wide":
                torch.set_num_threads(world.size)
            over_gloo = DefaultGroup(world.everyone, torch.device("cpu")) if name in THEIRS else None
            contender = make()
            group = alone().everyone if name in ALONE else world.everyone
            # In its first updates, a model of sharded parameters also compares the order of its layers between ranks.
            times[name] += timed(contender, args.steps, group, COMPARED_UPDATES)
            losses[name] = contender.loss
            if name in PLANS:
                exchange[name] += contender.exchange[-args.steps :]
            contender.close()
            del contender
            if over_gloo is not None:
                over_gloo.close()
            torch.set_num_threads(1)
            if name in ALONE:
                world.everyone.barrier("wait for one process", timeout_s=1800)
    mine = {name: (statistics.median(values), losses[name]) for name, values in times.items() if values}
    everywhere = world.everyone.allgather(mine, "collect the times")
    peaks = world.everyone.allgather(peak_mib(), "collect the peaks")
    shares = {name: statistics.median(values) for name, values in exchange.items() if values}
    waited = world.everyone.allgather(shares, "collect the waits")
    found = []
    one = everywhere[0]["one"][0] if "one" in names else None
    for name in names:
        seconds = max(rank[name][0] for rank in everywhere if name in rank)
        loss = next(rank[name][1] for rank in reversed(everywhere) if name in rank)
        ratio = round(seconds / one, 4) if one else None
        most = max(rank[name] for rank in waited) if name in shares else None
        found.append(Row(name, round(seconds * 1e3, 2), ratio, loss, max(peaks) if args.memory else None, most))
    return found


ALONE = ("one", "one-wide")


def maker(name: str, args: argparse.Namespace, world: World) -> Callable[[], Any] | None:
    """Returns a function that makes the contender; None on a rank that takes no part."""
    problem = args.model, args.batch, args.micro_batches
    if name in ALONE:
        return (lambda: Ours(*problem, alone(), {})) if world.rank == 0 else None
    if name in PLANS:
        return lambda: Ours(*problem, world, PLANS[name])
    return lambda: of_torch(name, *problem, world)


def peak_mib() -> float:
    """Peak resident memory of this process in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Measures; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--contenders", "--out"):
        parser.add_argument(name, required=True)
    for name in ("--batch", "--micro-batches", "--rounds", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--memory", default="")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    world = connect()
    found = measure(args.contenders.split(","), args, world)
    if world.rank == 0:
        write_rows(args.out, [asdict(row) for row in found])


if __name__ == "__main__":
    main()

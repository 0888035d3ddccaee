"""Trains models with sharded parameters, by scenario; rank 0 prints the results as JSON.

torch_fully_sharded.py FOLDER [SCENARIO ...]
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain import CheckpointStore, StepResult, Training, UserError
from hpctrain.backends.torch.process_groups import DefaultGroup
from hpctrain.backends.torch.strategies import strategy
from hpctrain.backends.torch.strategies.exchange import Exchange, TorchExchange, over_torch
from hpctrain.backends.torch.strategies.fsdp.layer_order import COMPARED_UPDATES
from hpctrain.backends.torch.strategies.fsdp.sharded_model import FullySharded
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.comm.group import Group
from hpctrain.comm.world import World, alone, from_communicator
from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import RunFailed
from hpctrain.train.clock import NO_CLOCK, Waiting
from hpctrain.train.state import StateTensor
from hpctrain.train.stateful import value_of
from tests.support import plan_runs, scenarios
from tests.support.attempts import attempt, furthest, whole_state
from tests.support.plan_runs import Watcher
from tests.tasks import tensor_tasks, torch_sharded
from tests.tasks.torch_tasks import (
    adagrad,
    cut,
    decaying,
    global_batches,
    in_float64,
    make_framework,
    mean_loss,
    train,
    weighted_loss,
)

PARAMETERS, GRADIENTS, OPTIMIZER, WHOLE = (
    ParallelConfig(shard=each) for each in ("parameters", "gradients", "optimizer", "none")
)
layout.LEAST_TILE_BYTES = 64  # tiles, as for large matrices
HYBRID = ParallelConfig(tensor=2, shard="parameters")
KEEPING = ParallelConfig(tensor=2, shard="gradients")
GPT = "tests.tasks.tensor_tasks:numbered"
STAGES = "tests.tasks.pipeline_tasks:numbered"
UPDATES = 6


def parts_of(world: World) -> dict[int, World]:
    """Worlds of the first N ranks, by N; the other ranks must not use them."""
    comm = world.everyone.comm
    assert comm is not None
    return {size: from_communicator(comm.Split(int(world.rank < size), world.rank)) for size in (1, 2, 4)}


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest difference between the numbers of two states; infinity if their names differ."""
    if found.keys() != wanted.keys():
        return float("inf")
    return furthest(list(found.values()), [wanted[name] for name in found])


def plans(world: World, folder: Path) -> dict[str, Any]:
    """A GPT with tied weights under several plans, and a run that changes its plan after each step, compared with one
    process."""
    parts = parts_of(world)
    tries = [
        ("two", 2, PARAMETERS, {}),
        ("four", 4, PARAMETERS, {}),
        ("recompute", 4, PARAMETERS, {"recompute": ("blocks.*",)}),
        ("hybrid", 4, HYBRID, {"recompute": ("blocks.*",)}),
        ("gradients", 4, GRADIENTS, {}),
        ("nodes", 4, ParallelConfig(shard="parameters", shard_within="node"), {}),
        ("offload", 4, ParallelConfig(tensor=2, shard="parameters", offload=True, layers=("Block",)), {}),
        ("gradients-hybrid", 4, KEEPING, {"recompute": ("blocks.*",)}),
    ]
    chain = [(2, PARAMETERS), (4, WHOLE), (2, OPTIMIZER), (4, HYBRID), (2, GRADIENTS), (1, PARAMETERS)]
    found: dict[str, Any] = {}
    wanted_ids, wanted = attempt(parts[1], folder / "alone", WHOLE, GPT, UPDATES) if world.rank == 0 else ([], {})
    for name, size, parallel, settings in tries:
        if world.rank < size:
            ranks = parts[size]
            if parallel.shard_within == "node":
                ranks = replace(ranks, node=ranks.rank % 2, nodes=2)
            ids, state = attempt(ranks, folder / name, parallel, GPT, UPDATES, **settings)
            found[name] = {"ids": ids == wanted_ids, "difference": difference(state, wanted)}
        world.everyone.barrier("end a run")
    ids_of_chain: list[list[int]] = []
    for last, (size, parallel) in enumerate(chain, start=1):
        if world.rank < size:
            ids, state = attempt(parts[size], folder / "chain", parallel, GPT, UPDATES, last)
            ids_of_chain += ids
        world.everyone.barrier("end an attempt")
    if world.rank == 0:
        found["chain"] = {"ids": ids_of_chain == wanted_ids, "difference": difference(state, wanted)}
        stores = [CheckpointStore(folder / name / "checkpoints") for name in ("two", "nodes")]
        found["problems"] = [problem for one in stores for problem in verify_checkpoint(one, UPDATES).problems]
        shapes = []
        for name in ("alone", "hybrid", "nodes"):
            saved = plan_runs.state_of(folder, name, UPDATES)
            shapes.append({key: array.shape for key, array in saved.items()})
            found["saved"] = difference(saved, wanted)
        found["shapes"] = {"number": len(shapes[0]), "same": shapes[0] == shapes[1] == shapes[2]}
    return found


EXCHANGED = {
    "tensor": (4, ParallelConfig(tensor=4), GPT),
    "tensor-data": (4, ParallelConfig(tensor=2), GPT),
    "classes": (2, ParallelConfig(tensor=2), "tests.tasks.tensor_tasks:classes"),
    "pipeline": (2, ParallelConfig(pipeline=2), STAGES),
    "pipeline-data": (4, ParallelConfig(pipeline=2, pipeline_chunks=2), STAGES),
    "four-stages": (4, ParallelConfig(pipeline=4), STAGES),
    "tensor-pipeline": (4, ParallelConfig(tensor=2, pipeline=2), STAGES),
}
"""Ranks, plan and task of runs whose ranks exchange tensors as they would on GPUs."""


def exchanges(world: World, folder: Path) -> dict[str, Any]:
    """Models with tensor parallelism and pipeline stages over torch process groups, with uneven micro-batches, some
    fewer than stages; compared with one process."""
    parts = parts_of(world)
    settings = {"global_batch": 7, "accumulate": 3}
    wanted = {}
    if world.rank == 0:
        for name, task in (("layers", GPT), ("stages", STAGES)):
            wanted[task] = attempt(parts[1], folder / f"one-{name}", WHOLE, task, UPDATES, **settings)
    found: dict[str, Any] = {}
    for name, (size, parallel, task) in EXCHANGED.items():
        opened: list[str] = []

        def noted(
            group: Group, device: torch.device, waiting: Waiting, timeout_s: float = 60.0, opened: Any = opened
        ) -> TorchExchange:
            opened.append(group.name)
            return over_torch(group, device, waiting, timeout_s)

        strategy.over_torch = noted
        if world.rank < size:
            run = folder / f"exchange-{name}"
            ids, state = attempt(parts[size], run, parallel, task, UPDATES, kind="nccl", **settings)
            if world.rank == 0:
                of_one = wanted.get(task, wanted[GPT])
                found[name] = {
                    "ids": ids == of_one[0],
                    "difference": difference(state, of_one[1]),
                    "opened": opened,
                }
        world.everyone.barrier("end a run")
    return found


def uneven(world: World, folder: Path) -> dict[str, Any]:
    """A model whose sizes divide by nothing, with a scalar, a frozen and an unused parameter, over batches of which the
    last has fewer samples than ranks; compared with one process."""

    def trained(
        ranks: World, loss: Any, made: Any, clip: float | None, parallel: ParallelConfig
    ) -> tuple[list[float], list[StateTensor]]:
        kind = "none" if ranks.size == 1 else "auto"
        framework = make_framework(
            ranks, torch_sharded.model, loss, made, in_float64, parallel=parallel, accumulate=2, clip_norm=clip,
            ema_decay=0.9, reduce={"kind": kind},
        )  # fmt: skip
        losses = train(framework, 8, 2)
        state = [each for each in framework.state() if each.name.startswith(plan_runs.STATE)]
        framework.close()
        return losses, state

    def one(loss: Any, made: Any, clip: float | None = 0.05, parallel: ParallelConfig = PARAMETERS) -> dict[str, Any]:
        wanted, whole = trained(alone(), loss, made, clip, WHOLE)
        losses, mine = trained(world, loss, made, clip, parallel)
        values = {each.name: value_of(each) for each in whole}
        distance, held = furthest([np.array(losses)], [np.array(wanted)]), {name: 0 for name in values}
        for each in mine:
            begin, value = each.cut.begin if each.cut else (0,) * len(each.shape), value_of(each)
            there = tuple(slice(at, at + size) for at, size in zip(begin, value.shape, strict=True))
            distance = max(distance, furthest([value], [values[each.name][there]]))
            held[each.name] += value.size
        everywhere = world.data.allgather([distance, held], "compare")
        return {
            "difference": max(each for each, _ in everywhere),
            "largest": [max(held[name] for _, held in everywhere) for name in values],
            "together": [sum(held[name] for _, held in everywhere) for name in values],
            "whole": [value.size for value in values.values()],
        }

    adamw, plain = torch_sharded.BY_ROWS["AdamW"], torch_sharded.BY_ROWS["SGD"]
    # AdamW and clipping hide gradients that are wrong by a constant factor.
    return {
        "mean": one(mean_loss, adamw),
        "weighted": one(weighted_loss, plain, clip=None),
        "adagrad": one(mean_loss, adagrad),
        "gradients": one(weighted_loss, plain, clip=None, parallel=GRADIENTS),
    }


def frozen(world: World, folder: Path) -> dict[str, Any]:
    """Whole states after updates during some of which, including the first, a layer is frozen; and those after an
    update in fp16 that an infinite gradient of one rank left out, and the next one, as hashes."""

    def state_of(ranks: World, parallel: ParallelConfig) -> dict[str, Any]:
        framework = make_framework(ranks, optimizer=decaying, parallel=parallel)
        for step, batch in enumerate(global_batches(8)):
            framework.model[0].requires_grad_(step not in (0, 1, 4, 5))
            framework.step(cut(batch, ranks.rank, ranks.size), len(batch["x"]))
        state = whole_state(framework, ranks.everyone)
        framework.close()
        return state

    def overflown(parallel: ParallelConfig) -> list[str]:
        framework = make_framework(world, precision="fp16", parallel=parallel)
        train(framework, 1)
        batch = next(global_batches(1))
        spoiled = {**batch, "x": batch["x"].copy()}
        spoiled["x"][-1, 0] = np.inf
        hashes = [framework.weights_hash()]
        for each in (spoiled, batch):
            framework.step(cut(each, world.rank, world.size), 30)
            hashes.append(framework.weights_hash())
        framework.close()
        return hashes

    wanted, found = state_of(alone(), WHOLE), dict[str, Any]()
    for parallel in (PARAMETERS, GRADIENTS):
        found[parallel.shard] = difference(state_of(world, parallel), wanted)
        found[f"{parallel.shard} overflow"] = world.data.allgather(overflown(parallel), "compare")
    return found


class Layers(nn.Module):
    """Layers of torch that use their weights in more ways than calling their submodules, some of them twice; and one
    for outliers, of which a rank may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Linear(12, 12)
        self.points = nn.Linear(3, 8)
        self.points.weight = nn.Parameter(self.points.weight.detach().t().contiguous().t())  # not contiguous
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, points: Tensor) -> Tensor:
        """``points``: [n, 3]."""
        if (far := points[:, :1] > 1.5).any():
            points = torch.where(far, self.far(points), points)
        found, _ = self.memory(self.encoder(self.points(points.view(-1, 4, 3))))
        hidden: Tensor = self.normed(found.mean(1))
        return self.head(hidden) + self.head(-2 * hidden)


def slope(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A gradient of the model as part of the loss."""
    points = batch["x"].double().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return found[:, :3]


def layers(world: World, folder: Path) -> dict[str, Any]:
    """Results of torch's own layers compared with one process, and the error for a loss that contains gradients."""
    losses = []
    for ranks, parallel in ((alone(), WHOLE), (world, PARAMETERS)):
        framework = make_framework(ranks, lambda: Layers().double(), forward=in_float64, parallel=parallel)
        losses.append(np.array(train(framework, UPDATES)))
        framework.close()
    framework = make_framework(world, lambda: Layers().double(), forward=slope, parallel=PARAMETERS)
    said = ""
    try:
        framework.dry_call({name: array[:3] for name, array in next(global_batches(1)).items()})
    except UserError as error:
        said = error.what
    framework.close()
    return {"difference": furthest(losses[1:], losses[:1]), "said": world.data.allgather(said, "compare")}


class Choosing(nn.Module):
    """Layers of which a forward pass uses only some."""

    def __init__(self, chosen: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])
        self.head = nn.Linear(12, 3)
        self.chosen = chosen

    def forward(self, points: Tensor) -> Tensor:
        """``points``: [n, 3]."""
        for number in self.chosen:
            points = torch.tanh(self.layers[number](points))
        found: Tensor = self.head(points)
        return found


def apart(world: World, folder: Path) -> dict[str, Any]:
    """Errors if ranks compute different layers or a different number of them, and if parameters get other storage; and
    the number of hooks in which ranks meet, before and after some updates."""
    first = world.rank == 0
    chosen = {"order": [0, 1] if first else [1, 0], "number": [0, 1] if first else [0], "memory": [0, 1]}
    said = {}
    for name, numbers in chosen.items():
        framework = make_framework(world, functools.partial(Choosing, numbers), parallel=PARAMETERS)
        try:
            for _ in range(2):
                train(framework, 1)
                for parameter in framework.model.parameters():
                    parameter.data = parameter.data.clamp(-0.1, 0.1)
        except UserError as error:
            said[name] = error.what
        framework.close()
    framework = make_framework(world, functools.partial(Choosing, [0, 1]), parallel=PARAMETERS)
    partition = framework.parts.partition
    assert isinstance(partition, FullySharded)
    order = partition.order
    hooks = [len(order.hooks)]
    train(framework, COMPARED_UPDATES + 1)
    hooks.append(len(order.hooks))
    framework.close()
    framework = make_framework(world, functools.partial(Choosing, [0, 1]), parallel=PARAMETERS)
    partition = framework.parts.partition
    assert isinstance(partition, FullySharded)
    order, found = partition.order, ""
    order.waits = False  # as on GPUs
    for place in [0, 1, 3] if first else [0, 1, 2, 3]:
        try:
            order.reach(place)
        except UserError as error:
            found = error.what
    framework.close()
    everywhere = world.data.allgather(found, "compare")
    return {"said": world.data.allgather(said, "compare"), "hooks": hooks, "at the end": everywhere}


class Deep(nn.Module):
    """Many equal layers, one of them with statistics of its own, and parameters outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)])
        self.head, self.unused = nn.Linear(WIDTH, 3), nn.Linear(2, 2)

    def forward(self, points: Tensor) -> Tensor:
        """``points``: [n, 12]."""
        found = self.norm(self.first(points))
        for layer in self.layers:
            found = found + layer(found)
        return self.head(found)  # type: ignore[no-any-return]


WIDTH, DEPTH = 256, 6


class Halves(TorchDispatchMode):
    """Notes the storages of all 16-bit tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.dtype == torch.bfloat16:
                self.known[one.untyped_storage()._cdata] = StorageWeakRef(one.untyped_storage())
        return found

    def num_bytes(self) -> int:
        """Bytes of those that still exist, whoever holds them."""
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.known.values()]
        return sum(one.nbytes() for one in alive if one is not None)


def halves(world: World, folder: Path) -> dict[str, Any]:
    """Bytes of 16-bit copies at the end of a forward pass in bf16, with at most 8 samples on each rank, and the losses
    of some updates; the same with whole parameters."""
    live: list[int] = []

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with Halves() as copies:
            found: Tensor = model(batch["x"])
            live.append(copies.num_bytes())
        return found

    sizes = {"layer": 2 * WIDTH * WIDTH, "root": 2 * 15 * WIDTH, "activations": 2 * 8 * WIDTH * 5 * DEPTH}
    found: dict[str, Any] = {**sizes}
    for name, parallel in (("sharded", PARAMETERS), ("whole", WHOLE)):
        live.clear()
        framework = make_framework(
            world, Deep, forward=forward, parallel=parallel, precision="bf16", clip_norm=0.5, accumulate=2
        )
        losses = train(framework, 3, 2)
        framework.close()
        found[name] = {"live": world.data.allgather(max(live, default=0), "compare"), "losses": losses}
    return found


def groups(world: World, folder: Path) -> dict[str, Any]:
    """Sums over torch process groups one after the other; parallel groups are independent."""
    half = world.everyone.split("half", world.rank % 2)
    sums = []
    for group in (world.everyone, half):
        with closing(DefaultGroup(group, torch.device("cpu"), timeout_s=60.0)):
            values = torch.arange(3.0) + world.rank
            torch.distributed.all_reduce(values)
            sums.append(values.tolist())
    everywhere = world.everyone.allgather(sums, "compare")
    return {"sums": everywhere, "is_open": torch.distributed.is_initialized()}


def lost(world: World, folder: Path) -> dict[str, Any]:
    """What rank 0 reports for each wait for a message that does not come, and for a rank that has ended."""
    waits: dict[str, Callable[[Exchange], Any]] = {
        "sum": lambda exchange: exchange.sum(torch.ones(3), torch.float32, "add up something"),
        "gather": lambda exchange: exchange.gather(torch.ones(3), "gather something"),
        "receive": lambda exchange: exchange.expect(torch.ones(3), 1, 0)("send something"),
        "send": lambda exchange: (exchange.post(torch.ones(4_000_000), 1, 0), exchange.settle("take something")),
        "ended": lambda exchange: exchange.sum(torch.ones(3), torch.float32, "add up something"),
    }
    said = {}
    for name, wait in waits.items():
        pair = world.everyone.part(f"pair {name}", world.rank < 2)  # what gave up once is of no more use
        if pair is not None:
            patience_s = 60.0 if name == "ended" else 0.5
            exchange = over_torch(pair, torch.device("cpu"), Waiting(NO_CLOCK), patience_s)
            exchange.sum(torch.ones(1), torch.float32, "meet")
            if name == "ended" and pair.rank:
                exchange.ranks.abort()  # closes its connections, as the end of its process would
                exchange.close()
                del exchange
            elif not pair.rank:
                try:
                    wait(exchange)
                except RunFailed as error:
                    said[name] = error.what
            pair.barrier("end a wait")
    return said


class Reducers(Watcher):
    """Records the reducer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.reducer: str | None = None

    def after_step(self, training: Training, result: StepResult) -> None:
        super().after_step(training, result)
        self.reducer = training.framework.facts.reducer_name


def run(folder: Path, name: str, task: str = "gpt", **keys: Any) -> dict[str, Any]:
    """A run as a run file describes it."""
    base: dict[str, Any] = {
        "task": f"{tensor_tasks.__file__}:{task}",
        "train__steps": 3,
        "train__global_batch": 6,
        "train__accumulate": 2,
        "parallel__shard": "parameters",
    }
    return plan_runs.train(folder, name, Reducers(), **base | keys)


def save_by_torch(ranks: Group, source: Path, folder: Path) -> None:
    """Saves the weights of a run, of a model that FSDP2 shards over all ranks, beside its optimizer's state."""
    task = tensor_tasks.gpt()
    assert isinstance(task.model, nn.Module) and isinstance(task.optimizer, torch.optim.Optimizer)
    arrays = CheckpointStore(source / "checkpoints").load().arrays
    weights = {name.removeprefix("model/"): torch.tensor(arrays[name]) for name in arrays if name.startswith("model/")}
    task.model.load_state_dict(weights, strict=False)  # of tied weights there is one
    with closing(DefaultGroup(ranks, torch.device("cpu"))):
        for layer in (*task.model.blocks, task.model):
            fully_shard(layer)
        state = {"model": task.model.state_dict(), "optimizer": task.optimizer.state_dict(), "step": 3}
        distributed_checkpoint.save(state, checkpoint_id=folder)


def runs(world: World, folder: Path) -> dict[str, Any]:
    """Runs by ``fit`` and commands: precisions, initial weights, predictions, refusals."""
    low = {"task_args__dtype": "float32", "train__steps": 2}
    found = {
        "whole": run(folder, "whole", parallel__shard="none", reduce__kind="mpi"),
        "run": run(folder, "run", monitor__enabled="true"),
        "initial": run(folder, "initial", train__steps=1, checkpoint__init_from=folder / "run"),
        "initial-whole": run(
            folder,
            "initial-whole",
            parallel__shard="none",
            reduce__kind="mpi",
            train__steps=1,
            checkpoint__init_from=folder / "run",
        ),
        "bf16": run(folder, "bf16", **low, train__precision="bf16"),
        "fp16": run(folder, "fp16", **low, train__precision="fp16", train__clip_norm=0.5),
        "adafactor": run(folder, "adafactor", task_args__optimizer="adafactor"),
    }
    save_by_torch(world.everyone, folder / "run", folder / "by-torch")
    for name, shard in (("of-torch", "parameters"), ("of-torch-whole", "optimizer")):
        begun = {"parallel__shard": shard, "train__steps": 1, "checkpoint__init_from": folder / "by-torch"}
        found[name] = run(folder, name, **begun)
    for plan, keys in (("cut", {"parallel__shard": "none", "reduce__kind": "mpi"}), ("hybrid", {})):
        own = {"parallel__tensor": 2, "task_args__dropout": 0.5, **keys}
        found[f"{plan}, kept"] = run(folder, f"{plan}-kept", **own)
        found[f"{plan}, again"] = run(folder, f"{plan}-again", **own, train__recompute="['blocks.*', 'words']")
    for name in ("whole", "run"):
        plan_runs.predict(folder, name)
    found["by layers"] = run(folder, "by-layers", task="by_layers")
    found["opened"] = run(folder, "opened", task="opening")
    torch.distributed.destroy_process_group()
    if world.rank == 0:
        predicted = [plan_runs.predictions(folder, name) for name in ("whole", "run")]
        found["run"]["predicted"] = furthest(predicted[1:], predicted[:1])
    return found


def keras_blocks(world: World, folder: Path) -> dict[str, Any]:
    """A Keras model under several plans, and a run that changes its plan after each step, compared with one process."""
    os.environ["KERAS_BACKEND"] = "torch"
    importlib.import_module("keras")  # before the task, as hpctrain asks
    parts, task = parts_of(world), "tests.tasks.keras_blocks:numbered"
    tries = {"two": (2, PARAMETERS), "four": (4, PARAMETERS), "gradients": (4, GRADIENTS), "optimizer": (4, OPTIMIZER)}
    tries["named"] = (2, ParallelConfig(shard="parameters", layers=("Block",), offload=True))
    wanted_ids, wanted = attempt(parts[1], folder / "keras", WHOLE, task, UPDATES) if world.rank == 0 else ([], {})
    found: dict[str, Any] = {}
    for name, (size, parallel) in tries.items():
        if world.rank < size:
            ids, state = attempt(parts[size], folder / f"keras-{name}", parallel, task, UPDATES)
            found[name] = {"ids": ids == wanted_ids, "difference": difference(state, wanted)}
        world.everyone.barrier("end a run")
    chain = [(2, PARAMETERS), (4, WHOLE), (4, GRADIENTS), (2, OPTIMIZER), (4, PARAMETERS), (1, PARAMETERS)]
    every: list[list[int]] = []
    for last, (size, parallel) in enumerate(chain, start=1):
        if world.rank < size:
            ids, state = attempt(parts[size], folder / "keras-chain", parallel, task, UPDATES, last)
            every += ids
        world.everyone.barrier("end an attempt")
    found["chain"] = {"ids": every == wanted_ids, "difference": difference(state, wanted) if world.rank == 0 else 0}
    return found


SCENARIOS: dict[str, Callable[[World, Path], dict[str, Any]]] = {
    each.__name__: each
    for each in (plans, exchanges, lost, uneven, frozen, layers, apart, halves, groups, keras_blocks, runs)
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenarios.main(SCENARIOS, sys.argv[2:], Path(sys.argv[1]))

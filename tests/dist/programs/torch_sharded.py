"""Trains torch models with sharded optimizer state, by scenario; rank 0 prints JSON.

torch_sharded.py <folder> <parallel.shard>[:<reduce.kind>] <scenario> ...
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.backends.torch.reduce import sharded_exchange
from hpctrain.backends.torch.reduce.sharded_exchange import MpiSharded, ShardedExchange, open_sharded_exchange
from hpctrain.comm.world import World, alone, from_communicator
from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import UserError
from hpctrain.reduce.flat_layout import SLOTS, SQUARE
from hpctrain.system import shared_memory
from hpctrain.train.stateful import value_of
from tests.support import scenarios
from tests.support.attempts import attempt, furthest
from tests.tasks import torch_own_steps as own
from tests.tasks import torch_sharded
from tests.tasks.combined_tasks import Coupled
from tests.tasks.torch_tasks import (
    cut,
    decaying,
    freeze_and_thaw,
    global_batches,
    in_float64,
    make_framework,
    train,
)

SHARD, _, KIND = sys.argv[2].partition(":")
KIND = KIND or "mpi"
SHARDED = ParallelConfig(shard=SHARD)  # type: ignore[arg-type]
WHOLE = ParallelConfig()
UPDATES = 6
LATER = 3
"""Updates before a stop."""
TASK = "tests.tasks.torch_sharded:task"


def trained(world: World, make: Callable[[nn.Module], Any], parallel: ParallelConfig, **settings: Any) -> Any:
    """Float64 parameters and their moving averages after some updates, and the optimizer's state by name."""
    kind = KIND if world.size > 1 else "none"
    framework = make_framework(
        world, torch_sharded.model, optimizer=make, forward=in_float64, parallel=parallel, reduce={"kind": kind},
        accumulate=2, clip_norm=0.05, ema_decay=0.9, **settings,
    )  # fmt: skip
    train(framework, UPDATES + 1, 2)  # the last global batch is smaller than the others
    numbers = [*framework.model.parameters(), *framework.source.averages.values]
    slots = [each for each in framework.state() if each.name.startswith("optimizer/")]
    framework.close()
    return [number.detach().numpy().copy() for number in numbers], {each.name: (each, value_of(each)) for each in slots}


def one_optimizer(world: World, make: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Compare with one process that sees whole batches."""
    numbers, slots = trained(world, make, SHARDED)
    wanted, whole = trained(alone(), make, WHOLE)
    of_slots = 0.0
    for name, (tensor, value) in slots.items():
        at = tensor.cut.begin if tensor.cut else (0,) * value.ndim
        there = whole[name][1][tuple(slice(begin, begin + size) for begin, size in zip(at, value.shape, strict=True))]
        of_slots = max(of_slots, furthest([value], [there]))
    shared = {name: value for name, (tensor, value) in slots.items() if tensor.cut}
    rows: dict[str, int] = {}
    for name, value in elements(shared):
        rows[name] = rows.get(name, 0) + value[:1].nbytes
    mine = {
        "numbers": furthest(numbers, wanted),
        "slots": of_slots,
        "elements": sum(value.nbytes for _, value in elements(shared)),
        "bytes": sum(value.nbytes for value in shared.values()),
        "row": max(rows.values(), default=0),
        "cut": [name for name, (tensor, value) in slots.items() if tensor.cut and tensor.cut.shape != value.shape],
    }
    everything = {name: value for name, (_, value) in whole.items() if not name.endswith("/frozen")}
    return {
        "ranks": world.data.allgather(mine, "compare"),
        "bytes": sum(value.nbytes for value in everything.values()),
        "elements": sum(value.nbytes for _, value in elements(everything)),
    }


def elements(slots: dict[str, Any]) -> list[tuple[str, Any]]:
    """State tensors that are not scalars, by the names of their parameters."""
    return [(name.rpartition("/")[2], value) for name, value in slots.items() if value.ndim]


def optimizers(world: World, folder: Path) -> dict[str, Any]:
    """Results by optimizer; on two ranks only some optimizers."""
    known = torch_sharded.BY_ROWS | torch_sharded.WHOLE
    names = torch_sharded.SOME if world.size == 2 else known
    return {name: one_optimizer(world, known[name]) for name in names}


def messages(world: World, folder: Path) -> dict[str, Any]:
    """The same without shared memory between ranks."""
    before, shared_memory.FOLDER = shared_memory.FOLDER, "/nonexistent"
    try:
        return one_optimizer(world, torch_sharded.BY_ROWS["AdamW"])
    finally:
        shared_memory.FOLDER = before


def exchanges(world: World, folder: Path) -> dict[str, Any]:
    """Reduce-scatter and all-gather by each way, for uneven ranges, one of them empty."""
    length, size = 1000, world.size
    ends = [0, *(7 + 300 * number for number in range(size - 1)), length]
    ends[1] = 0 if size > 2 else ends[1]
    ranges = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
    opened: dict[str, Callable[[], ShardedExchange]] = {
        "node": lambda: open_sharded_exchange(world.data, length + SLOTS, length, np.float64, ranges),
        "mpi": lambda: MpiSharded(world.data, length + SLOTS, length, np.float64, ranges),
        "large": lambda: MpiSharded(world.data, length + SLOTS, length, np.float64, ranges),
    }
    found = {}
    for name, make in opened.items():
        before = sharded_exchange.LARGEST_MESSAGE
        sharded_exchange.LARGEST_MESSAGE = 64 if name == "large" else before
        exchange = make()
        right = []
        for turn in range(3):
            values = [np.random.default_rng([turn, rank]).normal(size=length + SLOTS) for rank in range(size)]
            exchange.buffer[:] = values[world.rank]
            exchange.scatter(needs_norm=turn != 1)
            total, mine = np.sum(values, axis=0), ranges[world.rank]
            others = [slot for slot in range(SLOTS) if slot != SQUARE]
            right += [
                np.allclose(exchange.buffer[mine], total[mine], rtol=1e-13),
                np.allclose(exchange.slots[others], total[length:][others], rtol=1e-13),
                turn == 1 or bool(np.isclose(exchange.slots[SQUARE], np.sum(total[:length] ** 2), rtol=1e-12)),
            ]
            for leaving in exchange.leaving:
                leaving[mine] = world.rank + turn
            exchange.gather()
            back = [exchange.buffer[part] for owner, part in enumerate(ranges) if owner != world.rank]
            others = [owner for owner in range(size) if owner != world.rank]
            right += [bool(np.all(part == owner + turn)) for owner, part in zip(others, back, strict=True)]
        exchange.close()
        sharded_exchange.LARGEST_MESSAGE = before
        found[name] = {"kind": type(exchange).__name__, "right": world.data.allgather(right, "compare")}
    return found


def bits(world: World, folder: Path) -> dict[str, Any]:
    """Hashes of weights of replicated and sharded runs, in several precisions, on one node."""
    adam = torch_sharded.by_group(torch.optim.Adam)

    def halves() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 31), nn.Tanh(), nn.Linear(31, 3)).bfloat16()

    def in_bf16(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"].bfloat16()).float()

    settings: dict[str, dict[str, Any]] = {
        "fp32": {"optimizer": adam},
        "bf16": {"optimizer": adam, "precision": "bf16"},
        "fp16": {"optimizer": adam, "precision": "fp16"},
        "channels": {"optimizer": adam, "channels_last": True},
        "halves": {"optimizer": torch_sharded.muon, "model": halves, "forward": in_bf16},
    }
    found = {}
    for name, changes in settings.items():
        hashes = []
        for parallel, kind in ((SHARDED, KIND), (WHOLE, "mpi")):
            framework = make_framework(world, parallel=parallel, reduce={"kind": kind}, **changes)
            train(framework, UPDATES)
            hashes.append(framework.weights_hash())
            framework.close()
        found[name] = world.data.allgather(hashes, "compare")
    return found


def overflow(world: World, folder: Path) -> dict[str, Any]:
    """An infinite gradient on one rank skips the update on all, and the next one is made."""
    framework = make_framework(world, precision="fp16", parallel=SHARDED, reduce={"kind": KIND})
    train(framework, 1)
    batch = next(global_batches(1))
    spoiled = {**batch, "x": batch["x"].copy()}
    spoiled["x"][-1, 0] = np.inf
    hashes = [framework.weights_hash()]
    for each in (spoiled, batch):
        framework.step(cut(each, world.rank, world.size), 30)
        hashes.append(framework.weights_hash())
    framework.close()
    return {"hashes": world.data.allgather(hashes, "compare")}


def uneven(world: World, folder: Path) -> dict[str, Any]:
    """Rank 0 has three micro-batches, the last rank none, the others one: parameters compared with one process."""

    def parameters(world: World, parallel: ParallelConfig) -> list[Any]:
        framework = make_framework(
            world, torch_sharded.model, optimizer=torch_sharded.BY_ROWS["AdamW"], forward=in_float64,
            parallel=parallel, reduce={"kind": KIND if world.size > 1 else "none"}, clip_norm=0.05,
        )  # fmt: skip
        for batch in global_batches(UPDATES):
            pieces = [cut(batch, number, world.size + 1)[0] for number in range(world.size + 1)]
            own = pieces[:3] if world.rank == 0 else pieces[world.rank + 2 : world.rank + 3]
            framework.step(own if world.size > 1 else [batch], len(batch["x"]))
        found = [one.detach().numpy().copy() for one in framework.model.parameters()]
        framework.close()
        return found

    difference = furthest(parameters(world, SHARDED), parameters(alone(), WHOLE))
    return {"differences": world.data.allgather(difference, "compare")}


def own_steps(world: World, folder: Path) -> dict[str, Any]:
    """Two models and two optimizers in a custom step."""
    framework = own.make_framework(world, own.gan, parallel=SHARDED, clip_norm=None, reduce={"kind": KIND})
    own.train(framework, 8)
    hashes = world.data.allgather(framework.weights_hash(), "compare the weights")
    framework.close()
    return {"weights": own.weights(framework), "hashes": hashes}


class Bounded(nn.Module):
    """A layer that replaces the storage of its weights in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """``points``: [n, 3]."""
        self.layer.weight.data = self.layer.weight.data.clamp(-0.2, 0.2)
        return self.layer(points)


def replaced(world: World, folder: Path) -> dict[str, Any]:
    """Hashes of weights, replicated and sharded, of a model that replaces their storage."""
    hashes = []
    for parallel in (WHOLE, SHARDED):
        framework = make_framework(world, Bounded, parallel=parallel, reduce={"kind": KIND}, ema_decay=0.9)
        train(framework, UPDATES)
        framework.evaluate(next(global_batches(1)))
        train(framework, UPDATES)
        hashes.append(framework.weights_hash())
        framework.close()
    return {"hashes": world.data.allgather(hashes, "compare")}


def frozen(world: World, folder: Path) -> dict[str, Any]:
    """Differences of weights from those of one process, if a layer is frozen at times."""
    wanted = freeze_and_thaw(make_framework(alone(), optimizer=decaying))
    found = freeze_and_thaw(make_framework(world, optimizer=decaying, parallel=SHARDED, reduce={"kind": KIND}))
    return {"differences": world.data.allgather(float(np.abs(found - wanted).max()), "compare")}


def grown(world: World, folder: Path) -> dict[str, Any]:
    """The error for an optimizer that gets parameters later."""
    framework = make_framework(world, optimizer=lambda model: torch.optim.SGD([model[0].weight]), parallel=SHARDED)
    train(framework, 1)
    said = ""
    try:
        framework.optimizer.add_param_group({"params": [framework.model[0].bias]})
    except UserError as error:
        said = error.what
    framework.close()
    return {"said": world.data.allgather(said, "compare")}


def unknown(world: World, folder: Path) -> dict[str, Any]:
    """Error messages for an optimizer of which nothing is known."""
    said = ""
    try:
        make_framework(world, optimizer=lambda model: Coupled(model.parameters(), lr=0.1), parallel=SHARDED)
    except UserError as error:
        said = error.what
    return {"said": world.data.allgather(said, "compare")}


def resumed(world: World, folder: Path) -> dict[str, Any]:
    """Stopped with sharded and with unsharded state, and resumed on other numbers of ranks, both ways."""
    found: dict[str, Any] = {}
    comm = world.everyone.comm
    assert comm is not None
    parts = {size: from_communicator(comm.Split(int(world.rank < size), world.rank)) for size in {1, 2, world.size}}
    plans = [(size, parallel) for size in sorted(parts) for parallel in (SHARDED, WHOLE)]
    wanted_ids, wanted = (
        attempt(parts[1], folder / f"uninterrupted-{world.rank}", WHOLE, TASK, UPDATES) if world.rank == 0 else ([], {})
    )
    for begun in (SHARDED, WHOLE):
        saved = folder / begun.shard
        attempt(world, saved, begun, TASK, UPDATES, LATER)
        for size, parallel in plans:
            copy = folder / f"{begun.shard}-{size}-{parallel.shard}"
            if world.rank == 0:
                shutil.copytree(saved, copy)
            world.everyone.barrier("copy the run folder")
            if world.rank < size:
                ids, state = attempt(parts[size], copy, parallel, TASK, UPDATES)
                if world.rank == 0:
                    found[copy.name] = {
                        "ids": ids == wanted_ids[LATER:],
                        "names": state.keys() == wanted.keys(),
                        "difference": furthest(list(state.values()), [wanted[name] for name in state]),
                    }
            world.everyone.barrier("resume")
    return found


SCENARIOS: dict[str, Callable[[World, Path], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        optimizers,
        messages,
        exchanges,
        bits,
        overflow,
        uneven,
        own_steps,
        replaced,
        frozen,
        grown,
        unknown,
        resumed,
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenarios.main(SCENARIOS, sys.argv[3:], Path(sys.argv[1]))

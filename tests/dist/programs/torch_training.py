"""Trains small torch models, by scenario; rank 0 prints the results as JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix, MulticlassF1Score

from hpctrain import Selected
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.comm.world import World, alone
from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import Choice, ReducerChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.state import Placement
from tests.support import scenarios
from tests.support.choices import NoExchange
from tests.tasks import torch_own_steps as own
from tests.tasks.torch_metrics import Hits, Median
from tests.tasks.torch_tasks import (
    Words,
    adagrad,
    cut,
    decaying,
    freeze_and_thaw,
    global_batches,
    in_float64,
    make_framework,
    mean_loss,
    noisy_model,
    normalised_model,
    plain_sgd,
    samples,
    sgd,
    sparse_adam,
    train,
    weighted_loss,
    words_forward,
)

STEPS = 50
MEASURED = {"kind": "auto"}
GLOO = "gloo-overlap"
"""What reduce.kind: nccl is on CPUs."""


def outcome(framework: TorchFramework, losses: list[float]) -> dict[str, Any]:
    """Losses by step, and what must be equal on all ranks."""
    group = framework.world.data
    sums = []
    for tensor in framework.state():
        if tensor.placement is Placement.REPLICATED:
            value = np.zeros(tensor.shape, tensor.dtype)
            tensor.copy_into(value)
            sums.append(float(np.sum(value, dtype=np.float64)))
    return {
        "losses": losses,
        "reducer": framework.facts.reducer_name,
        "hashes": group.allgather(framework.weights_hash(), "compare the weights"),
        "replicated": group.allgather(sums, "compare the state"),
    }


def trained(world: World, steps: int = STEPS, accumulate: int = 1, **settings: Any) -> dict[str, Any]:
    """Train a new model."""
    framework = make_framework(world, **settings)
    found = outcome(framework, train(framework, steps, accumulate))
    framework.close()
    return found


def watched_once(world: World) -> dict[str, Any]:
    """With an optimizer hook on one rank only, which sees all gradients of each update."""
    seen: list[bool] = []

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        made = sgd(model)
        if world.rank == 1:
            made.register_step_pre_hook(lambda *_: seen.append(all(one.grad is not None for one in model.parameters())))
        return made

    found = trained(world, way="mpi-overlap", optimizer=optimizer)
    return {**found, "seen": world.data.allgather(seen, "compare")}


def frozen(world: World) -> dict[str, Any]:
    """Differences of weights from those of one process, by reducer, if a layer is frozen at times."""
    wanted = freeze_and_thaw(make_framework(alone(), optimizer=decaying))
    ways: dict[str, dict[str, Any]] = {way: {"way": way} for way in ("mpi-overlap", "horovod-flat", GLOO)}
    ways["auto"] = {"reduce": MEASURED}
    found = {name: freeze_and_thaw(make_framework(world, optimizer=decaying, **way)) for name, way in ways.items()}
    own = {way: float(np.abs(weights - wanted).max()) for way, weights in found.items()}
    return {"differences": world.data.allgather(own, "compare")}


def sabotaged(world: World) -> dict[str, Any]:
    """Training without the exchange, otherwise unchanged."""
    framework = make_framework(world, choice=NoExchange)
    return outcome(framework, train(framework, STEPS))


def not_finite(world: World, way: str = "mpi-overlap") -> dict[str, Any]:
    """A NaN in one sample of the third batch, on the last rank; other sums are in flight when the loss shows it."""
    framework = make_framework(world, way=way)
    train(framework, 2)
    return scenarios.not_finite(framework, world.data, next(global_batches(1)), cut)


def evaluated(world: World) -> dict[str, Any]:
    """Evaluation and prediction with averages of the weights."""
    framework = make_framework(world, ema_decay=0.9)
    train(framework, 3)
    return scenarios.evaluated(framework, world.data, samples(), cut)


def judged(world: World) -> dict[str, Any]:
    """Stateful metrics over parts of different size."""
    metrics = {
        "auc": Selected(BinaryAUROC(), lambda outputs, batch: (outputs[:, 0].sigmoid(), batch["y"] == 0)),
        "f1": Selected(MulticlassF1Score(3), lambda outputs, batch: (outputs, batch["y"])),
        "confusion": Selected(MulticlassConfusionMatrix(3), lambda outputs, batch: (outputs, batch["y"])),
        "hits": Selected(Hits(), lambda outputs, batch: (outputs, batch["y"])),
        "median": Selected(Median(), lambda outputs, batch: (outputs, batch["y"])),
    }
    return scenarios.judged(make_framework(world, metrics=metrics), world.data, samples(), cut)


def noises(world: World) -> dict[str, Any]:
    """Random numbers of each rank, and statistics of its samples."""
    framework = make_framework(world, model=noisy_model)
    train(framework, 2)
    drawn = torch.rand(()).item()
    statistics = next(iter(framework.model.buffers())).sum().item()
    placed = {tensor.name: tensor.placement.value for tensor in framework.state()}
    framework.close()
    return {"drawn": world.data.allgather([drawn, statistics], "compare the noise"), "placed": placed}


def overflowing(world: World, way: str | None = None) -> dict[str, Any]:
    """An infinite fp16 gradient on one rank skips the update on all ranks, and lowers the loss scale."""
    framework = make_framework(world, way=way, precision="fp16")
    train(framework, 1)
    batch = next(global_batches(1))
    batch["x"] = batch["x"].copy()
    batch["x"][-1, 0] = 1e6
    before, scale = framework.weights_hash(), framework.parts.optimizer_steps[""].rule.loss_scale.factor
    framework.step(cut(batch, world.rank, world.size), 30)
    after = [framework.weights_hash() == before, framework.parts.optimizer_steps[""].rule.loss_scale.factor / scale]
    framework.close()
    return {"after": world.data.allgather(after, "compare")}


def interrupted(world: World, **reduce: Any) -> dict[str, Any]:
    """Six updates, the first four in another framework whose state is passed on by name."""
    settings = {
        "model": noisy_model,
        "ema_decay": 0.9,
        "clip_norm": 0.5,
        "optimizer": adam,
        "reduce": {"kind": "mpi", **reduce},
    }
    straight = make_framework(world, **settings)
    losses = train(straight, 6)
    digest = straight.weights_hash()
    straight.close()
    first = make_framework(world, **settings)
    train(first, 4)
    saved = {}
    for tensor in first.state():
        saved[tensor.name] = np.zeros(tensor.shape, tensor.dtype)
        tensor.copy_into(saved[tensor.name])
    first.close()
    second = make_framework(world, **settings)
    second.load(saved)
    rest = []
    for batch in list(global_batches(6))[4:]:
        result = second.step(cut(batch, world.rank, world.size), len(batch["x"]))
        total, weight = world.data.sum(np.array(result.sums()["loss"]), "average the loss")
        rest.append(float(total / weight))
    same = rest == losses[4:] and second.weights_hash() == digest
    second.close()
    return {"same": world.data.allgather(same, "compare"), "hash": digest, "losses": losses}


def joined(world: World) -> dict[str, Any]:
    """Networks with BatchNorm over all ranks; the last of four ranks has no sample in every seventh batch."""
    settings = {"model": normalised_model, "forward": in_float64, "sync_batchnorm": True, "way": "mpi-overlap"}
    framework = make_framework(world, **settings)
    dry = {"x": np.ones((1, 12), np.float32), "y": np.zeros(1, np.int64)}
    if world.rank == 0 and world.size > 1:
        framework.dry_call(dry)  # needs no other rank, and must not update statistics from one sample
    found = outcome(framework, train(framework, 30))
    parts = cut(samples(), world.rank, world.size)
    found["evaluated"] = world.data.allgather([framework.evaluate(part) for part in parts], "evaluate")
    found["placed"] = {tensor.name: tensor.placement.value for tensor in framework.state()}
    framework.close()
    pieces = make_framework(
        world, **{**settings, "way": None}, reduce=MEASURED
    )  # measured on a batch of uneven micro-batches
    batch = {name: array[:7] for name, array in next(global_batches(1)).items()}
    pieces.step(cut(batch, world.rank, world.size, 2), 7)
    found["uneven"] = outcome(pieces, [])["hashes"]
    saved = {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in pieces.state()}
    for tensor in pieces.state():
        tensor.copy_into(saved[tensor.name])
    saved["model/1.running_mean"] += world.rank  # as from a run with separate statistics on each rank
    pieces.load(saved)
    found["loaded"] = outcome(pieces, [])["hashes"]
    pieces.close()
    return found


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose state has step counts."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def words(world: World, sparse: bool, mode: str = "densify") -> dict[str, Any]:
    """Train with sparse gradients."""
    try:
        return trained(
            world, 10, model=partial(Words, sparse), forward=lambda model, batch: model(batch), reduce={"sparse": mode}
        )
    except UserError as error:
        return {"error": str(error)}


def tables(world: World, kind: str = "mpi") -> dict[str, Any]:
    """Rows of embeddings, with and without loss weights, by optimizers that update only rows."""
    found = {}
    for optimizer in (plain_sgd, adagrad, sparse_adam):
        for loss in (mean_loss, weighted_loss):
            for mode in ("auto", "densify") if optimizer is not sparse_adam else ("auto",):
                settings = {"reduce": {"sparse": mode, "kind": kind}, "clip_norm": 0.3, "ema_decay": 0.9}
                found[f"{optimizer.__name__}, {loss.__name__}, {mode}"] = trained(
                    world, 9, 2, model=Words, forward=words_forward, optimizer=optimizer, loss=loss, **settings
                )
    return found


def rehearsed(world: World) -> dict[str, Any]:
    """A measured choice of reducer does not affect training: random state and statistics are restored."""
    losses = []
    for way in (None, "mpi-node"):
        choices: list[Choice] = []
        framework = make_framework(world, noisy_model, way=way, choice=partial(ReducerChoice, record=choices.append))
        losses.append(train(framework, 5))
        framework.close()
        if way is None:
            seconds = choices[0].seconds if choices else {}
    return {"losses": losses, "measured": sorted(seconds)}


def own_steps(world: World, task: Callable[[], TorchTask] = own.gan, **settings: Any) -> dict[str, Any]:
    """Weights after 8 custom steps, which each rank has tried alone before."""
    framework = own.make_framework(world, task, **settings)
    framework.dry_call(own.part_of_rank(next(own.global_batches(1)), world))
    reported = own.train(framework, 8)
    hashes = world.data.allgather(framework.weights_hash(), "compare the weights")
    framework.close()
    return {"weights": own.weights(framework), "losses": [step["loss"] for step in reported], "hashes": hashes}


def joined_own_steps(world: World) -> dict[str, Any]:
    """Two models with BatchNorm over all ranks; on several ranks, more micro-batches than samples in the last batch."""
    found = own_steps(world, own.normalised_gan, sync_batchnorm=True)
    if world.size > 1:
        pieces = own.make_framework(world, own.normalised_gan, sync_batchnorm=True, accumulate=8)
        own.train(pieces, 4)
        found["pieces"] = world.data.allgather(pieces.weights_hash(), "compare the weights")
        pieces.close()
        for name, step, cut in (("own", own.cut_step, 1), ("plain", None, 2)):
            framework = own.make_framework(
                world, partial(own.with_batchnorm, step), way="mpi-node", sync_batchnorm=True, accumulate=2
            )
            own.train(framework, 8, pieces=cut)
            found[name] = own.weights(framework)
            framework.close()
    return found


def steps_apart(world: World) -> dict[str, Any]:
    """What the ranks report if rank 0 omits part of a step."""

    def leaves_out(what: str) -> TorchTask:
        def step(ctx: Any, batch: dict[str, torch.Tensor]) -> None:
            if what == "layer" and not world.rank:
                return
            scores = ctx.model(batch["x"])
            if what == "backward" or (what == "gather" and world.rank):
                scores = ctx.gather(scores)
            if what == "gather" or world.rank:
                ctx.backward(scores.mean())
                ctx.update()

        made = own.one(step)
        if what != "layer":
            return made
        model = own.normalised(6, 6)
        return dataclasses.replace(made, model=model, optimizer=own.adam(model))

    said = []
    for what in ("update", "gather", "backward", "layer"):
        framework = own.make_framework(world, partial(leaves_out, what), way="mpi-node", sync_batchnorm=what == "layer")
        try:
            own.train(framework, 1)
        except UserError as error:
            said.append(error.what)
        framework.close()
    return {"said": world.data.allgather(said, "compare")}


def own_overflow(world: World) -> dict[str, Any]:
    """A gradient of one optimizer that overflows on one rank skips its update on all, and no other."""
    framework = own.make_framework(world, own.single_gan, way="mpi-node", precision="fp16")
    before = own.weights(framework)
    batch = next(own.global_batches(1))
    batch["x"] = batch["x"].copy()
    batch["x"][-1, 0] = np.inf  # finite loss, infinite gradient
    framework.step([own.part_of_rank(batch, world)], len(batch["x"]))
    moved = np.not_equal(own.weights(framework), before)
    size = sum(parameter.numel() for parameter in framework.task.model["generator"].parameters())
    framework.close()
    return {"moved": world.data.allgather([bool(moved[:size].any()), bool(moved[size:].any())], "compare")}


def blocks() -> torch.nn.Module:
    """Two equal blocks, which are compiled by themselves, and a layer that is not."""
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(12, 3))


class Block(torch.nn.Module):
    """A layer of several modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Dropout(0.1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = values + torch.tanh(self.inner(values))
        return changed


def compiled(world: World) -> dict[str, Any]:
    """Losses with and without train.compile, by what it is combined with. No code is generated, which takes seconds."""
    compile_ = torch.compile
    torch.compile = lambda model, mode=None: compile_(model, backend="aot_eager")  # type: ignore[assignment,misc]
    found: dict[str, Any] = {}
    plans: dict[str, dict[str, Any]] = {
        "overlap": {"way": "mpi-overlap"},
        "device": {"way": GLOO},
        "recompute": {"way": "mpi-overlap", "recompute": ("0", "1"), "ema_decay": 0.9, "clip_norm": 0.05},
        **{shard: {"parallel": ParallelConfig(shard=shard)} for shard in ("optimizer", "parameters")},
    }
    for name, settings in plans.items():
        for compiles in (False, True):
            framework = make_framework(world, blocks, compile=compiles, **settings)
            found[f"{name} {compiles}"] = train(framework, 8, 2)
            in_place = [type(layer.forward).__name__ == "partial" for layer in framework.model]
            found[f"{name} {compiles} layers"] = sum(in_place)
            framework.close()
    torch.compile = compile_  # type: ignore[misc]
    return found


class Spectral(torch.nn.Module):
    """A layer with complex weights between real ones, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 8).double(), torch.nn.Linear(8, 3).double()
        self.weight = torch.nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(torch.fft.irfft(torch.fft.rfft(self.up(values.double())) * self.weight, n=8))
        return outputs


def spectral(world: World) -> dict[str, Any]:
    """Losses of a model with complex parameters, by how its gradients are summed."""
    plans: dict[str, dict[str, Any]] = {
        **{way: {"way": way} for way in ("mpi-overlap", "horovod-flat", GLOO)},
        "optimizer": {"parallel": ParallelConfig(shard="optimizer")},
    }
    return {name: trained(world, 12, model=Spectral, clip_norm=0.5, **settings) for name, settings in plans.items()}


WAYS = ("mpi-node", "mpi-flat", "mpi-overlap", "horovod-flat", "horovod-overlap", "gloo-flat", GLOO)

SCENARIOS: dict[str, Callable[[World], dict[str, Any]]] = {
    "spectral": spectral,
    "auto": lambda world: trained(world, reduce=MEASURED),
    "mpi": lambda world: trained(world, reduce={"kind": "mpi"}),
    "horovod": lambda world: trained(world, reduce={"kind": "horovod"}),
    "nccl": lambda world: trained(world, reduce={"kind": "nccl"}),
    **{way: partial(trained, way=way) for way in WAYS},
    "accumulate-gloo": lambda world: trained(world, accumulate=3, way=GLOO),
    "clip-gloo": lambda world: trained(world, clip_norm=0.05, ema_decay=0.9, way=GLOO),
    "weighted-gloo": lambda world: trained(world, loss=weighted_loss, way=GLOO),
    "fp16-gloo": lambda world: trained(world, way="gloo-overlap-fp16", accumulate=2),
    "bf16-gloo": lambda world: trained(world, way="gloo-flat-bf16"),
    "not_finite-gloo": partial(not_finite, way=GLOO),
    "overflowing-gloo": partial(overflowing, way=GLOO),
    "interrupted-gloo": lambda world: interrupted(world, kind="nccl"),
    "tables-gloo": partial(tables, kind="nccl"),
    "own-gloo": lambda world: own_steps(world, way=GLOO),
    "accumulate": lambda world: trained(world, accumulate=3, way="mpi-overlap"),
    "clip": lambda world: trained(world, clip_norm=0.05, ema_decay=0.9),
    "watched": watched_once,
    "frozen": frozen,
    "compiled": compiled,
    "weighted": lambda world: trained(world, loss=weighted_loss),
    "fp16-wire": lambda world: trained(world, way="mpi-overlap-fp16", accumulate=2),
    "bf16-wire": lambda world: trained(world, way="mpi-flat-bf16"),
    "fp16-horovod": lambda world: trained(world, way="horovod-overlap-fp16"),
    "bf16": lambda world: trained(world, precision="bf16"),
    "fp16": lambda world: trained(world, way="mpi-overlap-fp16", precision="fp16", clip_norm=10.0),
    "sparse": lambda world: words(world, sparse=True),
    "dense": lambda world: words(world, sparse=False),
    "refused": lambda world: words(world, sparse=True, mode="refuse"),
    "sabotaged": sabotaged,
    "not_finite": not_finite,
    "evaluated": evaluated,
    "judged": judged,
    "noises": noises,
    "overflowing": overflowing,
    "interrupted": interrupted,
    "rehearsed": rehearsed,
    "joined": joined,
    "tables": tables,
    "own": own_steps,
    "own-joined": joined_own_steps,
    "own-horovod": lambda world: own_steps(world, way="horovod-flat"),
    "own-accumulate": lambda world: own_steps(world, way="mpi-overlap", accumulate=4),
    "own-pairs": lambda world: own_steps(world, lambda: own.one(own.whole_step), way="mpi-node"),
    "own-rows": lambda world: own_steps(world, lambda: own.one(own.own_rows_step), way="mpi-node"),
    "own-weighted": lambda world: own_steps(world, lambda: own.one(own.weighted_step), way="mpi-node", accumulate=3),
    "own-apart": steps_apart,
    "own-overflow": own_overflow,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenarios.main(SCENARIOS, sys.argv[1:])

"""Trains small Keras models, by scenario; rank 0 prints the results as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain import Selected
from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.comm.world import World
from tests.support import scenarios
from tests.support.choices import NoExchange
from tests.tasks.tensorflow_tasks import (
    cut,
    embedding_model,
    global_batches,
    make_framework,
    noisy_model,
    normalised_model,
    samples,
    train,
    weighted_loss,
    wide_model,
)

STEPS = 50


def outcome(framework: KerasFramework, losses: list[float]) -> dict[str, Any]:
    """Losses by step, and what must be equal on all ranks."""
    hashes = framework.group.allgather(framework.weights_hash(), "compare the weights")
    slots = [tensor for tensor in framework.source.variables() if tensor.name.startswith(("optimizer/", "ema/"))]
    sums = [float(np.sum(tensor.host_view(), dtype=np.float64)) for tensor in slots]
    return {"losses": losses, "hashes": hashes, "slots": framework.group.allgather(sums, "compare the slots")}


def trained(world: World, steps: int = STEPS, accumulate: int = 1, **settings: Any) -> dict[str, Any]:
    """Train a new model."""
    framework = make_framework(world, **settings)
    losses = train(framework, steps, accumulate)
    found = outcome(framework, losses)
    framework.close()
    return found


def sabotaged(world: World) -> dict[str, Any]:
    """Training without the exchange, otherwise unchanged."""
    framework = make_framework(world, choice=NoExchange)
    return outcome(framework, train(framework, STEPS))


def not_finite(world: World) -> dict[str, Any]:
    """A NaN in one sample of the second batch, on the last rank."""
    framework = make_framework(world)
    train(framework, 1)
    return scenarios.not_finite(framework, world.data, next(global_batches(1)), cut)


def evaluated(world: World) -> dict[str, Any]:
    """Evaluation and prediction with averages of the weights."""
    framework = make_framework(world, ema_decay=0.9)
    train(framework, 3)
    return scenarios.evaluated(framework, world.data, samples(), cut)


def judged(world: World) -> dict[str, Any]:
    """Stateful metrics over parts of different size."""

    def one_hot(outputs: Any, batch: Any) -> Any:
        return tf.nn.softmax(outputs), tf.one_hot(batch["y"], 3)

    metrics = {
        "keras_auc": Selected(keras.metrics.AUC(), one_hot),
        "keras_f1": Selected(keras.metrics.F1Score(), one_hot),
        "iou": Selected(keras.metrics.MeanIoU(3), lambda outputs, batch: (tf.argmax(outputs, 1), batch["y"])),
        "precision": Selected(keras.metrics.Precision(), lambda *given: (*one_hot(*given), given[1]["w"][:, None])),
    }
    return scenarios.judged(make_framework(world, metrics=metrics), world.data, samples(), cut)


SPARSE_OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipped momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-2),  # a tiny epsilon amplifies rounding errors
}
"""The first two update only rows; the others get whole tables, of which only rows are exchanged."""


def tables(world: World) -> dict[str, Any]:
    """Rows of embeddings; finally a batch of one sample, of which the other ranks have no rows."""
    found = {}
    for name, optimizer in SPARSE_OPTIMIZERS.items():
        for kind in ("mpi", "horovod") if name == "sgd" and world.size > 1 else ("mpi" if world.size > 1 else "none",):
            settings: dict[str, Any] = {"kind": kind, "clip_norm": 0.3, "ema_decay": 0.9, "loss": weighted_loss}
            framework = make_framework(world, embedding_model, optimizer=optimizer, **settings)
            losses = [*train(framework, 9, 2), *train(framework, 4)]
            last = {array: values[-1:] for array, values in samples().items()}
            framework.step(cut(last, world.rank, world.size), 1)
            looked_up, *others = [np.asarray(one) for one in framework.task.model.trainable_variables]
            told = outcome(framework, losses) | {"by rows": any(framework.program.packing.is_table)}
            told["weights"] = [*looked_up[: 150 * 250 : 250].ravel(), *np.concatenate([one.ravel() for one in others])]
            told["weights"] = [float(value) for value in told["weights"]]
            found[f"{name}, {kind}"] = told
            framework.close()
    return found


def noises(world: World) -> dict[str, Any]:
    """Dropout and random numbers of each rank."""
    framework = make_framework(world, model=noisy_model)
    train(framework, 2)
    seeds = [tensor.host_view().tolist() for tensor in framework.source.variables() if tensor.name.startswith("rng/")]
    drawn = float(tf.random.get_global_generator().uniform(()))
    return {"seeds": framework.group.allgather([*seeds, drawn], "compare the noise")}


def joined(world: World) -> dict[str, Any]:
    """Networks with BatchNormalization over all ranks; the last of four ranks has no sample in every seventh batch."""
    settings = {"model": in_float64, "sync_batchnorm": True}
    framework = make_framework(world, **settings)
    if world.rank == 0:
        framework.dry_call(cut(next(global_batches(1)), world.rank, world.size)[0])  # needs no other rank
    found = outcome(framework, train(framework, 30))
    parts = cut(samples(), world.rank, world.size)
    found["evaluated"] = framework.group.allgather([framework.evaluate(part) for part in parts], "evaluate")
    framework.close()
    pieces = make_framework(world, kind="auto", **settings)  # measured on a batch of uneven micro-batches
    batch = {name: array[:7] for name, array in next(global_batches(1)).items()}
    pieces.step(cut(batch, world.rank, world.size, 2), 7)
    found["uneven"] = outcome(pieces, [])["hashes"]
    pieces.close()
    return found


def in_float64() -> keras.Model:
    """Return a new model in float64."""
    keras.config.set_dtype_policy("float64")
    return normalised_model()


SCENARIOS: dict[str, Callable[[World], dict[str, Any]]] = {
    "auto": lambda world: trained(world, kind="auto"),
    "mpi": trained,
    "horovod": lambda world: trained(world, kind="horovod"),
    "accumulate": lambda world: trained(world, accumulate=3),
    "clip": lambda world: trained(world, clip_norm=0.05, ema_decay=0.9),
    "weighted": lambda world: trained(world, loss=weighted_loss),
    "wide": lambda world: trained(world, model=wide_model),
    "tables": tables,
    "fp16-wire": lambda world: trained(world, kind="auto", reduce={"compression": "fp16"}),
    "bf16-wire": lambda world: trained(world, kind="auto", reduce={"compression": "bf16"}),
    "bf16": lambda world: trained(world, precision="bf16", model=noisy_model),
    "fp16": lambda world: trained(world, precision="fp16", model=noisy_model),
    "sabotaged": sabotaged,
    "not_finite": not_finite,
    "evaluated": evaluated,
    "judged": judged,
    "noises": noises,
    "joined": joined,
}


if __name__ == "__main__":
    scenarios.main(SCENARIOS, sys.argv[1:])

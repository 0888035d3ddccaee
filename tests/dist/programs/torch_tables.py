"""Trains a recommender whose tables are sharded over the ranks, one run folder each; rank 0 prints JSON.

torch_tables.py FOLDER PART
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hpctrain import StepResult, Training
from hpctrain.comm.world import connect
from tests.support import plan_runs
from tests.support.plan_runs import Watcher
from tests.tasks import table_tasks

EVERYONE = connect().everyone
OPTIMIZERS = ("sparse-adam", "adagrad", "sgd", "momentum")


class Parts(Watcher):
    """Records each rank's part of the tables, too."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[dict[str, int]] = []
        """Elements of each table and of its optimizer state, by rank and name."""
        self.reducer: str | None = None
        self.hashes: list[tuple[str, str]] = []
        """Hashes of each rank's own weights, and of the replicated ones."""
        self.summed = 0
        """Bytes of gradients that are summed over the ranks."""

    def after_step(self, training: Training, result: StepResult) -> None:
        super().after_step(training, result)
        self.reducer = training.framework.facts.reducer_name
        self.summed = training.framework.facts.gradient_bytes

    def after_fit(self, training: Training, reason: Any) -> None:
        model: Any = training.framework.model  # type: ignore[attr-defined]
        parts = training.framework.source.optimizer_state.parts  # type: ignore[attr-defined]
        states = [part.optimizer.state for part in parts]
        held = {}
        for name, table in model.tables.items():
            [weight] = table.parameters()
            held[name] = weight.numel()
            own = next((slots for state in states for one, slots in state.items() if one is weight), {})
            held |= {f"{name}.{slot}": value.numel() for slot, value in own.items() if getattr(value, "ndim", 0)}
        self.held = EVERYONE.allgather(held, "compare what they have")
        mine = [training.framework.weights_hash(shared_only=shared) for shared in (False, True)]
        self.hashes = EVERYONE.allgather(mine, "compare the weights")


def run(
    folder: Path, name: str, steps: int = 6, task: str = "recommender", drifts: bool = False, **keys: Any
) -> dict[str, Any]:
    """One attempt of a run."""
    base: dict[str, Any] = {
        "task": f"{table_tasks.__file__}:{task}",
        "train__steps": steps,
        "train__global_batch": 11,
        "train__accumulate": 2,
        "train__clip_norm": 0.05,
        "train__ema_decay": 0.9,
        "parallel__shard": "tables",
        "reduce__kind": "mpi" if EVERYONE.size > 1 else "auto",
        "reduce__verify_every_steps": 1,
        "checkpoint__keep_last": 9,
    }
    drift = [plan_runs.Drift(lambda model: model.deep[0].bias)] if drifts else []
    return plan_runs.train(folder, name, Parts(), drift, **base | keys)


FEW = {"train__global_batch": 7, "train__accumulate": 3}
"""Batches so small that of four ranks some have fewer micro-batches."""
LOW = {"task_args__dtype": "float32", "task_args__optimizer": "sparse-adam"}


def compared(folder: Path, ranks: int) -> dict[str, Any]:
    """Results that must be the same on any number of ranks."""
    found = {
        f"adamw-{ranks}": run(folder, f"adamw-{ranks}"),
        f"few-{ranks}": run(folder, f"few-{ranks}", **FEW),
        f"weighted-{ranks}": run(folder, f"weighted-{ranks}", task_args__weighs="true", train__clip_norm="null"),
    }
    return found | {
        f"{one}-{ranks}": run(folder, f"{one}-{ranks}", task_args__optimizer=one, reduce__kind="auto")
        for one in OPTIMIZERS
    }


def first(folder: Path) -> dict[str, Any]:
    """Results of one process, and the start of a run that others continue."""
    found = compared(folder, 1) | {"chain-1": run(folder, "chain", 1)}
    return found | {"initial-1": run(folder, "initial-1", 1, checkpoint__init_from=folder / "adamw-1")}


def four(folder: Path) -> dict[str, Any]:
    """Results of four ranks."""
    found = compared(folder, 4) | {
        "horovod-4": run(folder, "horovod-4", reduce__kind="horovod", reduce__overlap="on"),
        "begun": run(folder, "again", 3),
        "ended": run(folder, "again"),
        "recomputed-4": run(folder, "recomputed-4", train__recompute="['tables.*', 'deep.0']"),
        "initial-4": run(folder, "initial-4", 1, checkpoint__init_from=folder / "adamw-1"),
        "valueless": run(folder, "valueless", 1, checkpoint__init_from=folder / "adamw-1", task_args__device="meta"),
        "bf16": run(folder, "bf16", 2, **LOW, train__precision="bf16"),
        "fp16": run(folder, "fp16", 2, **LOW, train__precision="fp16"),
        "drifted": run(folder, "drifted", drifts=True, train__clip_norm="null"),
        "adafactor": run(folder, "adafactor", task_args__optimizer="adafactor"),
        "unmarked": run(folder, "unmarked", task="unmarked"),
        "penalised": run(folder, "penalised", task="penalised"),
    }
    plan_runs.predict(folder, "adamw-4")
    for step, shard in enumerate(("tables", "none", "tables", "optimizer"), start=2):
        found[f"chain-{step}"] = run(folder, "chain", step, parallel__shard=shard)
    return found


def two(folder: Path) -> dict[str, Any]:
    """Results of two ranks, which have other samples each than four do."""
    return compared(folder, 2) | {"chain-6": run(folder, "chain", 6)}


def last(folder: Path) -> dict[str, Any]:
    """One process continues a run of two ranks."""
    plan_runs.predict(folder, "adamw-1")
    return {"chain-7": run(folder, "chain", 7), "adamw-1-7": run(folder, "adamw-1", 7)}


if __name__ == "__main__":
    everything = {"first": first, "four": four, "two": two, "last": last}[sys.argv[2]](Path(sys.argv[1]))
    if EVERYONE.rank == 0:
        print(json.dumps(everything))

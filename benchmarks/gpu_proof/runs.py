"""Runs of hpctrain inside a row: run files, reported losses and last checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.gpu_proof.tasks import NAME
from hpctrain import BaseHook, CheckpointStore, Config, Event, Hook, StopReason, fit, load_config
from hpctrain.run.events import Train

OF_WEIGHTS = "model/"


class Losses:
    """A sink that keeps the mean loss of each step."""

    def __init__(self) -> None:
        self.of_step: dict[int, float] = {}

    def event(self, event: Event) -> None:
        """Keeps the loss of a ``train`` event."""
        if isinstance(event, Train) and event.step is not None and event.loss is not None:
            self.of_step[event.step] = event.loss

    def close(self) -> None:
        """Nothing to close."""


class StopAfter(BaseHook):
    """Ends the attempt after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, training: Any, result: Any) -> StopReason | None:
        """Returns the stop reason at that step."""
        return StopReason.REQUESTED if training.state.step == self.step else None


def run_file(folder: Path, task: str, task_args: dict[str, Any], steps: int, batch: int, **sections: Any) -> Config:
    """Makes a run that reports each step, reads samples in order and saves its last step."""
    train = {"steps": steps, "global_batch": batch, **sections.pop("train", {})}
    words = {
        "name": folder.name,
        "run_dir": str(folder),
        "task": task if ":" in task else f"{NAME}:{task}",
        "task_args": task_args,
        "train": train,
        "data": {"shuffle": "none", **sections.pop("data", {})},
        "checkpoint": {"interval": "none", **sections.pop("checkpoint", {})},
        "track": {"every_steps": 1, **sections.pop("track", {})},
        "monitor": {"enabled": False},  # tested in its own row
        **sections,
    }
    path = folder.with_suffix(f".{os.getpid()}.yaml")  # one file per rank
    path.write_text(yaml.safe_dump(words))
    return load_config(path)


def trained(config: Config, hooks: Sequence[Hook] = ()) -> Losses:
    """Runs or resumes a run; returns the reported losses, on rank 0."""
    losses = Losses()
    fit(config, hooks=hooks, sinks=[losses], verbose=True)
    return losses


def saved(folder: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a run's newest checkpoint, each whole."""
    loaded = CheckpointStore(folder / "checkpoints").load()
    assert loaded is not None, "each run saves its last step"
    return {name: np.asarray(array) for name, array in loaded.arrays.items()}


def different(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> list[str]:
    """Names of arrays that are not bitwise identical."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or one[name].tobytes() != other[name].tobytes()
    ]


def furthest(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """Largest difference, relative to the larger of 1 and the absolute value."""
    return max(
        float(np.max(np.abs(np.asarray(one) - other) / np.maximum(1, np.abs(other)), initial=0))
        for one, other in zip(ones, others, strict=True)
    )

"""Metrics of training batches are those of one process over the same samples, under any plan, and change no weight."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.mpi import printed
from tests.tasks.metered_data import SAMPLES, X, Y, outputs

EVERY, BATCH = 2, 8
"""Steps of an interval and samples of a step: of 29 samples, the last step has 5, and two ranks have different ones."""
NAMES = {"torch": ["share", "largest", "median", "hits"], "keras": ["accuracy", "largest", "median", "hits"]}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"train": {"accumulate": 3}},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}, "train": {"accumulate": 2}},
    "optimizer": {"parallel": {"shard": "optimizer"}},
    "parameters": {"parallel": {"shard": "parameters"}, "train": {"accumulate": 2}},
    "compiled": {"train": {"compile": True}},
    "local": {"sync": {"kind": "local", "every_steps": 2, "after_steps": 1}},
}
SCENARIOS = {
    ("torch", 1): ["plain", "accumulated", "compiled"],
    ("torch", 2): [one for one in PLANS if one != "compiled"],
}
SCENARIOS |= {(one, ranks): ["plain", "accumulated"] for one in ("tensorflow", "keras-torch") for ranks in (1, 2)}
CASES = [(*key, name) for key, names in SCENARIOS.items() for name in names]

pytestmark = pytest.mark.world_size(2)


def run_files(folder: Path, backend: str, names: list[str]) -> list[Path]:
    """Run files: of each plan with a rate of 0, and of training with and without metrics."""
    paths = []
    kind = backend.partition("-")[0]
    for name, reports, lr in ((one, *rest) for one in names for rest in ((True, 0.0), (True, 0.1), (False, 0.1))):
        plan = PLANS[name]
        arguments: dict[str, Any] = {"lr": lr}
        metrics = NAMES[kind if kind == "torch" else "keras"]
        if name == "parameters":
            arguments |= {"has_library": False}
            metrics = metrics[:3]
        path = folder / f"{name}-{reports}-{lr}.yaml"
        keys = {
            "name": path.stem,
            "run_dir": str(folder / path.stem),
            "task": f"tests.tasks.metered_{'torch' if backend == 'torch' else 'keras'}:task",
            "task_args": arguments,
            **plan,
            "train": {
                "epochs": 1,
                "global_batch": BATCH,
                "eval_every_steps": 3,
                "metrics": metrics if reports else [],
                **plan.get("train", {}),
            },
            "data": {"shuffle": "none"},
            "track": {"every_steps": EVERY},
            "monitor": {"enabled": False},
            "checkpoint": {"enabled": False},
        }
        path.write_text(json.dumps(keys))
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    """What all runs on a backend and a number of ranks report, run once."""

    @functools.cache
    def launched(backend: str, ranks: int) -> Any:
        folder = tmp_path_factory.mktemp(f"{backend}-{ranks}")
        paths = run_files(folder, backend, SCENARIOS[backend, ranks])
        keras = "tensorflow" if backend == "tensorflow" else "torch"
        return printed(ranks, "training_metrics.py", keras, *paths, warm=keras)

    return launched


def expected() -> list[dict[str, float]]:
    """By NumPy, of the samples of each interval."""
    intervals = []
    for begin in range(0, SAMPLES, EVERY * BATCH):
        rows = slice(begin, begin + EVERY * BATCH)
        given, targets = outputs()[rows], Y[rows]
        hits = float((given.argmax(1) == targets).mean())
        weighted = float((given[:, 0] * targets).sum() / targets.sum())
        both = {"share": hits, "accuracy": hits, "hits": hits, "hits/share": hits}
        median = {"median/value": float(np.median(given[:, 0])), "median/samples": len(given)}
        intervals.append({**both, "largest": weighted, **median})
    return intervals


@pytest.mark.parametrize(("backend", "ranks", "name"), CASES)
def test_they_are_those_of_all_samples_of_an_interval(found, backend, ranks, name):
    said = found(backend, ranks)[f"{name}-True-0.0"]["means"]
    assert len(said) == len(expected()) == 2 and len(X) == SAMPLES
    for each, wanted in zip(said, expected(), strict=True):
        assert len(each) == (5 if name == "parameters" else 6), each
        for metric in each.keys() - {"loss"}:
            assert each[metric] == pytest.approx(wanted[metric], rel=1e-5), metric  # fp32


@pytest.mark.parametrize(("backend", "ranks", "name"), CASES)
def test_they_change_no_bit_of_the_weights(found, backend, ranks, name):
    results = found(backend, ranks)
    plain, metered = (results[f"{name}-{reports}-0.1"] for reports in (False, True))
    assert plain["hash"] == metered["hash"]
    assert [each["loss"] for each in plain["means"]] == [each["loss"] for each in metered["means"]]
    assert all(each.keys() == {"loss"} for each in plain["means"])

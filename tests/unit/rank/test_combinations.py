"""Each row of the table is refused in a real run, and features that share no row train together."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import TABLE, Feature, Row, clash, page
from hpctrain.config.loading import load
from hpctrain.errors import UserError
from hpctrain.rank.fit import fit
from hpctrain.rank.problem import make_problem
from hpctrain.rank.wiring import make_framework
from hpctrain.registry.register import register_model
from hpctrain.run.folder import RunDir
from hpctrain.system.output import quiet_environment
from hpctrain.train.clock import IntervalClock
from tests.support import combined_keras_tasks, combined_tasks

PLAIN = {
    "name": "run",
    "train.global_batch": "8",
    "train.steps": "2",
    "reduce.kind": "none",
    "monitor.enabled": "false",
    "checkpoint.interval": "none",
}
KEYS: dict[Feature, dict[str, str]] = {
    Feature.ACCUMULATE: {"train.accumulate": "2"},
    Feature.BEST: {"checkpoint.best_metric": "loss"},
    Feature.BF16: {"train.precision": "bf16"},
    Feature.BF16_SUMS: {"reduce.compression": "bf16"},
    Feature.CHANNELS_LAST: {"train.channels_last": "true"},
    Feature.CLIP: {"train.clip_norm": "1.0"},
    Feature.COMPILE: {"train.compile": "true"},
    Feature.CYCLE_EPOCHS: {"schedule.kind": "restarts", "schedule.cycle_epochs": "1"},
    Feature.DENSIFY: {"reduce.sparse": "densify"},
    Feature.EARLY_STOP: {"train.early_stop.metric": "loss"},
    Feature.EMA: {"train.ema_decay": "0.9"},
    Feature.EPOCHS: {"train.epochs": "1", "train.steps": "null"},
    Feature.EXPONENTIAL: {"schedule.kind": "exponential"},
    Feature.FP16: {"train.precision": "fp16"},
    Feature.FP16_SUMS: {"reduce.compression": "fp16"},
    Feature.HOROVOD: {"reduce.kind": "horovod"},
    Feature.INITIAL_WEIGHTS: {"checkpoint.init_from": "weights.safetensors"},
    Feature.NO_CHECKPOINTS: {"checkpoint.enabled": "false"},
    Feature.NO_EVALUATIONS: {"train.eval_every_epochs": "null"},
    Feature.NO_REDUCER: {"reduce.kind": "none"},
    Feature.ONE_CYCLE: {"schedule.kind": "one_cycle"},
    Feature.OVERLAP: {"reduce.overlap": "on"},
    Feature.PIPELINE: {"parallel.pipeline": "2"},
    Feature.PLATEAU: {"schedule.kind": "plateau"},
    Feature.RECOMPUTE: {"train.recompute": "['*']"},
    Feature.SCHEDULE: {"schedule.kind": "cosine"},
    Feature.SHARD: {"parallel.shard": "optimizer"},
    Feature.SHARD_PARAMETERS: {"parallel.shard": "parameters"},
    Feature.SHARD_TABLES: {"parallel.shard": "tables"},
    Feature.SHORT_BATCH: {"train.global_batch": "13"},
    Feature.STAGED_ENVIRONMENT: {"launch.stage_environment": "true"},
    Feature.STEP_EPOCHS: {"schedule.kind": "step", "schedule.step_epochs": "[1]"},
    Feature.SYNC_BATCHNORM: {"train.sync_batchnorm": "true"},
    Feature.TENSOR: {"parallel.tensor": "2"},
    Feature.VERIFY: {"reduce.verify_every_steps": "1"},
    Feature.WARMUP: {"schedule.warmup_steps": "1"},
    Feature.WARMUP_EPOCHS: {"schedule.warmup_epochs": "0.4"},
    Feature.WORKERS: {"data.workers": "1"},
    Feature.WRAP: {"launch.slurm.wrap": "[apptainer, exec]"},
}
"""What says in a run file that a feature is used; the others are the task's."""
IMPLIED = {
    Feature.GATHER: {Feature.OWN_STEP},
    Feature.SEVERAL_MODELS: {Feature.OWN_STEP, Feature.SEVERAL_OPTIMIZERS},
    Feature.SEVERAL_OPTIMIZERS: {Feature.OWN_STEP, Feature.SEVERAL_MODELS},
    Feature.EVALUATION_SCHEDULER: {Feature.TORCH_SCHEDULER, Feature.TASK_SCHEDULE},
    Feature.TORCH_SCHEDULER: {Feature.TASK_SCHEDULE},
    Feature.WARMUP: {Feature.SCHEDULE},
    Feature.SYNC_BATCHNORM: {Feature.JOINT_LAYERS},
    Feature.TEST_STEP: {Feature.TRAIN_STEP},
    Feature.WARMUP_EPOCHS: {Feature.WARMUP, Feature.SCHEDULE},
    **{kind: {Feature.SCHEDULE} for kind, keys in KEYS.items() if "schedule.kind" in keys},
}
"""What else a run uses that uses a feature."""
KERAS_ONLY = {
    Feature.KERAS,
    Feature.TABLES,
    Feature.BUILT_OPTIMIZER,
    Feature.GLOBAL_CLIPNORM,
    Feature.KERAS_SCHEDULE,
    Feature.TRAIN_STEP,
    Feature.TEST_STEP,
    Feature.FP32_MODEL,
}
ELSEWHERE = {Feature.INITIAL_WEIGHTS, Feature.HOROVOD, Feature.SHORT_BATCH, Feature.TENSOR, Feature.PIPELINE}
"""Those that take more than one process and its data."""
OF_RUN_FILES = {one for one in KEYS if one not in ELSEWHERE}
OF_ALL = {
    *(OF_RUN_FILES - {Feature.NO_REDUCER, Feature.BF16_SUMS, Feature.STAGED_ENVIRONMENT, Feature.WRAP}),
    Feature.JOINT_LAYERS,
    Feature.METRICS,
    Feature.NO_VALIDATION,
    Feature.RATE_HOOK,
    Feature.SAMPLER,
    Feature.STREAM,
    Feature.TASK_SCHEDULE,
    Feature.VALIDATION,
}
TORCH = {
    *OF_ALL,
    Feature.COMPILED_MODEL,
    Feature.COUPLED,
    Feature.EVALUATION_SCHEDULER,
    Feature.GATHER,
    Feature.HALF_PARAMETERS,
    Feature.OWN_OPTIMIZER_STATE,
    Feature.OWN_STEP,
    Feature.SEVERAL_MODELS,
    Feature.SPARSE_ADAM,
    Feature.STEP_HOOKS,
    Feature.TORCH_SCHEDULER,
    Feature.VOLUMES,
}
OF_LOOP = {one for one, keys in KEYS.items() if "schedule.kind" in keys and one is not Feature.PLATEAU}
OF_LOOP |= {Feature.DENSIFY, Feature.EARLY_STOP, Feature.EPOCHS, Feature.NO_CHECKPOINTS, Feature.WARMUP_EPOCHS}
OF_LOOP |= {Feature.NO_EVALUATIONS, Feature.SAMPLER, Feature.SHARD_PARAMETERS, Feature.SHARD_TABLES, Feature.WORKERS}
KERAS = {*(OF_ALL - OF_LOOP), *(KERAS_ONLY - {Feature.KERAS, Feature.FP32_MODEL})}
"""Without what Keras has no part in, which is tried in PyTorch."""
OF_IMAGES = {Feature.COMPILED_MODEL, Feature.HALF_PARAMETERS, Feature.JOINT_LAYERS, Feature.VOLUMES}
CONTRARY = [
    {Feature.VALIDATION, Feature.NO_VALIDATION},
    {Feature.WARMUP, Feature.WARMUP_EPOCHS},  # two keys of one warm-up
    *({Feature.SPARSE_ADAM, of_images} for of_images in OF_IMAGES),
    *itertools.combinations((Feature.COUPLED, Feature.OWN_OPTIMIZER_STATE, Feature.SPARSE_ADAM), 2),
]

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by torch.compile itself


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets, for the test only."""
    for name, value in quiet_environment(False, {}).items():
        monkeypatch.setenv(name, value)


TWO = {"data": Feature.RANKS, "tensor": Feature.TENSOR, "pipeline": Feature.PIPELINE}


class Pair(Group):
    """A group of two, of which the other one is never asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.size = 2


def config_of(uses: set[Feature], folder: Path) -> Any:
    """The run file that uses these features; the others are its task's."""
    module = combined_keras_tasks if uses & KERAS_ONLY else combined_tasks
    keys = PLAIN | {"task": f"{module.__file__}:task", "run_dir": str(folder / "run")}
    if Feature.RANKS in uses:
        keys["reduce.kind"] = "auto"
    keys["task_args.uses"] = str([feature.name for feature in sorted(uses)])
    for feature in sorted(uses, key=lambda one: one is not Feature.SCHEDULE):  # other kinds of it win
        if feature is not Feature.WARMUP or Feature.WARMUP_EPOCHS not in uses:
            keys |= KEYS.get(feature, {})
    return load(None, [word for key, value in keys.items() for word in (f"--{key}", value)])


def run(uses: set[Feature], folder: Path) -> dict[str, float]:
    """Its metrics, of a few steps on one process."""
    config = config_of(uses, folder)
    if uses & set(TWO.values()):
        groups = {name: Pair(name) if one in uses else Group(name) for name, one in TWO.items()}
        two = World(Group("world"), local=Group("local"), node=0, nodes=1, host="host", **groups)
        make_framework(config, two, make_problem(config, two).task, IntervalClock())
    compiles = uses & {Feature.COMPILE, Feature.COMPILED_MODEL} and not uses & KERAS_ONLY
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext():  # minutes, else
        metrics = fit(config).metrics
    if Feature.REGISTRY in uses:
        before = dict(os.environ)
        try:
            register_model(RunDir.for_config(config), None, str(folder / "mlflow"), None)
        finally:  # MLflow leaves variables there
            os.environ.clear()
            os.environ.update(before)
    return dict(metrics)


def name_of(features: Iterable[Feature]) -> str:
    return "-".join(sorted(feature.name for feature in features))


def marks_of(row: Row) -> list[pytest.MarkDecorator]:
    """MLflow takes seconds to load."""
    return [pytest.mark.slow] if Feature.REGISTRY in row.features else []


@pytest.mark.parametrize("row", [pytest.param(row, id=name_of(row.features), marks=marks_of(row)) for row in TABLE])
def test_each_row_is_refused(row: Row, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        run(set(row.features), tmp_path)
    sentence = re.sub(r"\\\{\d(!r)?\\\}", ".+", re.escape(row.what))
    assert re.search(f"{sentence}$", refused.value.what)
    assert refused.value.fix == row.fix


def closed(uses: Iterable[Feature]) -> set[Feature]:
    """With what they imply."""
    found = set(uses)
    return found.union(*(IMPLIED.get(one, set()) for one in found))


def fit_together(uses: Iterable[Feature]) -> bool:
    """Whether one run can use all of them, and the table does not forbid it."""
    everything = closed(uses)
    keys: dict[str, set[str]] = {}
    for one in everything - ({Feature.SCHEDULE, Feature.WARMUP} - set(uses)):
        for key, value in KEYS.get(one, {}).items():
            keys.setdefault(key, set()).add(value)
    if any(len(values) > 1 for values in keys.values()) or any(everything.issuperset(pair) for pair in CONTRARY):
        return False
    return clash(dict.fromkeys(everything)) is None


def runs_of(features: set[Feature], always: Iterable[Feature] = ()) -> list[set[Feature]]:
    """A few runs in which each two features that go together do so; all use some."""
    pairs = [{*pair, *always} for pair in itertools.combinations(sorted(features), 2)]
    left = [pair for pair in pairs if fit_together(pair)]
    runs = []
    while left:
        chosen = set(left[0])
        while True:
            fitting = [one for one in sorted(features - chosen) if fit_together({*chosen, one})]
            gain = {one: sum(one in pair and pair <= {*chosen, one} for pair in left) for one in fitting}
            best = max(fitting, key=lambda one: gain[one], default=None)
            if best is None or not gain[best]:
                break
            chosen.add(best)
        runs.append(chosen)
        left = [pair for pair in left if not pair <= chosen]
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("uses", runs_of(TORCH), ids=name_of)
def test_all_other_pairs_train_in_pytorch(uses: set[Feature], tmp_path: Path) -> None:
    metrics = run(closed(uses), tmp_path)
    assert all(map(math.isfinite, metrics.values())) and bool(metrics) != (Feature.NO_VALIDATION in uses)


@pytest.mark.slow
@pytest.mark.parametrize("uses", runs_of(KERAS, [Feature.KERAS]), ids=name_of)
def test_all_other_pairs_train_in_keras(uses: set[Feature], tmp_path: Path) -> None:
    metrics = run(closed(uses), tmp_path)
    assert all(map(math.isfinite, metrics.values())) and bool(metrics) != (Feature.NO_VALIDATION in uses)


def test_the_page_is_in_step() -> None:
    written = (Path(__file__).parents[3] / "docs" / "combinations.md").read_text(encoding="utf-8")
    assert page() in written, "python -m hpctrain.config.combinations prints the table"

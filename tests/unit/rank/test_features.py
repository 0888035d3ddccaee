"""Features are found where they are used, and combinations are refused, or train, in real runs.

The table itself is tested as data: tests/unit/config/test_combinations.py.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.backends.torch.task import opening
from hpctrain.comm.group import Group
from hpctrain.comm.world import World, alone
from hpctrain.config.combinations import clash
from hpctrain.config.features import Feature
from hpctrain.config.loading import load
from hpctrain.errors import UserError
from hpctrain.rank.fit import fit
from hpctrain.rank.problem import make_problem, task_features
from hpctrain.rank.wiring import make_framework
from hpctrain.train.clock import IntervalClock
from tests.tasks import combined_keras_tasks, combined_tasks

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
    Feature.LOCAL_SYNC: {"sync.kind": "local"},
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
    Feature.SHARD_GRADIENTS: {"parallel.shard": "gradients"},
    Feature.SHARD_PARAMETERS: {"parallel.shard": "parameters"},
    Feature.SHORT_BATCH: {"train.global_batch": "13"},
    Feature.STEP_EPOCHS: {"schedule.kind": "step", "schedule.step_epochs": "[1]"},
    Feature.SYNC_BATCHNORM: {"train.sync_batchnorm": "true"},
    Feature.TENSOR: {"parallel.tensor": "2"},
    Feature.VERIFY: {"reduce.verify_every_steps": "1"},
    Feature.WARMUP: {"schedule.warmup_steps": "1"},
    Feature.WARMUP_EPOCHS: {"schedule.warmup_epochs": "0.4"},
    Feature.WORKERS: {"data.workers": "1"},
}
"""What says in a run file that a feature is used; the others are the task's."""
KERAS_ONLY = {
    Feature.KERAS,
    Feature.KERAS_SCHEDULE,
    Feature.TRAIN_STEP,
    Feature.TEST_STEP,
}
TWO = {"data": Feature.RANKS, "tensor": Feature.TENSOR, "pipeline": Feature.PIPELINE}

pytestmark = [
    pytest.mark.usefixtures("environment_of_a_run"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),  # by torch.compile itself
]


class Pair(Group):
    """A group of two, of which the other one is never asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.size = 2


def features_of(names: str) -> set[Feature]:
    """By name."""
    return {Feature[name] for name in names.split()}


def config_of(uses: set[Feature], folder: Path) -> Any:
    """The run file that uses these features; the others are its task's."""
    module = combined_keras_tasks if uses & KERAS_ONLY else combined_tasks
    keys = PLAIN | {"task": f"{module.__file__}:task", "run_dir": str(folder / "run")}
    if Feature.RANKS in uses:
        keys["reduce.kind"] = "auto"
    keys["task_args.uses"] = str([feature.name for feature in sorted(uses)])
    for feature in sorted(uses, key=lambda one: one is not Feature.SCHEDULE):  # other kinds of it win
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
        return dict(fit(config).metrics)


BY_A_TASK = """
    CAPTURED_MODEL CARRIED COMPILED_MODEL EVALUATION_SCHEDULER EXTRA_STATE HALF_PARAMETERS JOINT_LAYERS MAX_NORM
    MIXED_PARAMETERS NO_CUTS NO_EVAL_LOSS NO_FORWARD NO_LAYERS NO_VALIDATION OWN_OPTIMIZER_STATE OWN_PRECISION
    OWN_STEP PARAMETER_HOOKS PER_RANK RATE_HOOK SAMPLER SEVERAL_MODELS SEVERAL_OPTIMIZERS SPARSE_ADAM SPARSE_ROWS
    STEP_HOOKS STREAM TASK_SCHEDULE TORCH_METRICS TORCH_SCHEDULER VALIDATION META_INIT VOLUMES
"""
NEEDED = {
    Feature.NO_EVAL_LOSS: {Feature.OWN_STEP, Feature.NO_VALIDATION},
    Feature.NO_FORWARD: {Feature.SEVERAL_MODELS, Feature.NO_VALIDATION},
}
"""With what else a task can use a feature."""


@pytest.mark.parametrize("feature", sorted(features_of(BY_A_TASK)), ids=lambda one: one.name)
def test_what_a_task_uses_is_found(feature, tmp_path, monkeypatch):
    """And a plain task uses none of it."""

    def found(uses):
        config, seen = config_of(uses, tmp_path), dict[Feature, Any]()
        monkeypatch.setattr(opening, "refuse", seen.update)
        problem = make_problem(config, alone())
        with contextlib.suppress(UserError):  # a model on the meta device gets no values here
            make_framework(config, alone(), problem.task, IntervalClock()).close()
        return seen | task_features(config.task, problem.task, problem.order, 1)

    assert feature in found({feature, *NEEDED.get(feature, ())})
    plain = Feature.NO_VALIDATION if feature is Feature.VALIDATION else Feature.VALIDATION
    assert feature not in found({plain})


REFUSED = {
    "the run file": "COMPILE SYNC_BATCHNORM",
    "the reducers": "NO_REDUCER RANKS",
    "the data": "STREAM EPOCHS",
    "the hooks": "TORCH_SCHEDULER RATE_HOOK",
    "the model": "FP16 HALF_PARAMETERS",
    "the types of parameters": "FP16 OWN_PRECISION",
    "the stages": "PIPELINE CAPTURED_MODEL",
    "the kind of the optimizer": "SHARD UNKNOWN_OPTIMIZER RANKS",
    "the rows of parameters": "SHARD_PARAMETERS WHOLE_TENSORS RANKS",
    "a call of the step": "OWN_STEP ACCUMULATE GATHER",
    "the end of the step": "OWN_STEP ACCUMULATE NO_SPLIT",
    "the last batch": "OWN_STEP SHORT_BATCH RANKS",
    "a Keras model": "BF16 OWN_PRECISION KERAS",
    "a Keras schedule": "KERAS_SCHEDULE TASK_SCHEDULE",
    "a train_step": "TRAIN_STEP OTHER_OPTIMIZER",
    "a Keras reducer": "KERAS OVERLAP",
    "rates of a KerasTask": "KERAS GROUP_RATES",
}
"""One combination for each place in which features become known, and are tried."""


@pytest.mark.parametrize("names", REFUSED.values(), ids=REFUSED)
def test_each_place_refuses(names, tmp_path):
    uses = features_of(names)
    with pytest.raises(UserError) as refused:
        run(uses, tmp_path)
    row = clash(dict.fromkeys(uses, True))
    assert row is not None and refused.value.fix == row.fix
    assert re.search(re.sub(r"\\\{\d(!r)?\\\}", ".+", re.escape(row.what)) + "$", refused.value.what)


TRAINED = {
    "an own step of several models, and nearly all that goes with it": """
        BEST BF16 CLIP COMPILED_MODEL CYCLE_EPOCHS DENSIFY EPOCHS FP16_SUMS GATHER HALF_PARAMETERS JOINT_LAYERS METRICS
        NO_CHECKPOINTS NO_EVALUATIONS OVERLAP OWN_OPTIMIZER_STATE OWN_STEP RATE_HOOK RECOMPUTE SAMPLER SEVERAL_MODELS
        STEP_HOOKS SYNC_BATCHNORM VALIDATION VERIFY VOLUMES WARMUP WORKERS""",
    "a sharded optimizer": """
        ACCUMULATE CHANNELS_LAST CLIP COMPILED_MODEL EMA EPOCHS FP16 JOINT_LAYERS METRICS NO_EVALUATIONS NO_VALIDATION
        OWN_STEP RATE_HOOK SAMPLER SCHEDULE SEVERAL_MODELS SHARD UNKNOWN_OPTIMIZER VERIFY WARMUP WORKERS""",
    "sharded parameters": """
        ACCUMULATE BEST BF16 CLIP COMPILE UNKNOWN_OPTIMIZER DENSIFY EARLY_STOP EVALUATION_SCHEDULER HALF_PARAMETERS
        METRICS RECOMPUTE SHARD_PARAMETERS STREAM VALIDATION VOLUMES""",
    "sharded gradients": """
        ACCUMULATE CHANNELS_LAST CLIP EMA EPOCHS FP16 METRICS NO_VALIDATION RATE_HOOK RECOMPUTE SAMPLER SHARD_GRADIENTS
        WARMUP WORKERS""",
    "16-bit sums while backward runs": """
        ACCUMULATE BEST CHANNELS_LAST CLIP EARLY_STOP EMA EPOCHS EVALUATION_SCHEDULER FP16 FP16_SUMS METRICS OVERLAP
        RECOMPUTE SAMPLER SPARSE_ADAM VALIDATION VERIFY WORKERS""",
    "compiled steps of a stream, with a plateau": """
        BEST CLIP COMPILE UNKNOWN_OPTIMIZER EARLY_STOP EMA FP16 GATHER METRICS OWN_STEP PLATEAU RATE_HOOK SEVERAL_MODELS
        STREAM VALIDATION VERIFY VOLUMES WARMUP""",
    "Keras, and nearly all that goes with it": """
        KERAS ACCUMULATE BEST BF16 CLIP COMPILE EMA FP16_SUMS JOINT_LAYERS KERAS_SCHEDULE METRICS STREAM VALIDATION
        VERIFY""",
    "Keras in fp16, with hooks": """
        KERAS ACCUMULATE CLIP EMA FP16 METRICS NO_VALIDATION RATE_HOOK STREAM SYNC_BATCHNORM VERIFY WARMUP""",
    "a Keras model with its own steps": """
        KERAS TEST_STEP TRAIN_STEP BF16 EMA FP16_SUMS KERAS_SCHEDULE BEST VALIDATION STREAM VERIFY""",
}
"""As many features at once as go together, for each way to update: most pairs that share no row are in one of them."""


@pytest.mark.slow
@pytest.mark.parametrize("names", TRAINED.values(), ids=TRAINED)
def test_features_that_share_no_row_train_together(names, tmp_path):
    uses = features_of(names)
    metrics = run(uses, tmp_path)
    assert all(map(math.isfinite, metrics.values())) and bool(metrics) != (Feature.NO_VALIDATION in uses)

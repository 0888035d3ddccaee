"""Features of runs: keys of the run file and properties of tasks that rows of ``refusals`` combine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import StrEnum, auto
from typing import Any


class Feature(StrEnum):
    """Something that a run uses, or lacks; the value is its key in the run file, or how people call it.

    The values of ``parallel.shard`` are those listed here; their docstrings are part of the reference of that key.
    """

    ACCUMULATE = "train.accumulate"
    BEST = "checkpoint.best_metric"
    BF16 = "train.precision: bf16"
    BF16_SUMS = "reduce.compression: bf16"
    CAPTURED_MODEL = "a loss, forward or metric that holds parts of the model"
    CARRIED = "a CarriedState in state= of the task"
    CHANNELS_LAST = "train.channels_last"
    CLIP = "train.clip_norm"
    COMPILE = "train.compile"
    COMPILE_MODE = "train.compile_mode"
    COMPILED_MODEL = "a model that the task compiles"
    CUDNN_BENCHMARK = "train.cudnn_benchmark"
    CYCLE_EPOCHS = "schedule.cycle_epochs"
    DENSIFY = "reduce.sparse: densify"
    EARLY_STOP = "train.early_stop.metric"
    EMA = "train.ema_decay"
    EPOCHS = "train.epochs"
    EVALUATION_SCHEDULER = "a TorchScheduler(every='evaluation')"
    EXPONENTIAL = "schedule.kind: exponential"
    EXTRA_STATE = "modules with extra state"
    FP16 = "train.precision: fp16"
    FP16_SUMS = "reduce.compression: fp16"
    GATHER = "ctx.gather"
    GROUP_RATES = "a rate for each parameter group"
    HALF_PARAMETERS = "16-bit parameters"
    HOROVOD = "reduce.kind: horovod"
    INITIAL_WEIGHTS = "checkpoint.init_from"
    JOINT_LAYERS = "BatchNorm layers that normalise over all ranks"
    KERAS = "a KerasTask on TensorFlow"
    KERAS_ON_TORCH = "a KerasTask on PyTorch"
    KERAS_SCHEDULE = "a Keras schedule in the optimizer"
    LOCAL_SYNC = "sync.kind: local"
    LOSS_SCALE = "a LossScaleOptimizer or loss_scale_factor"
    MAX_NORM = "an embedding with max_norm"
    META_INIT = "parameters on the meta device"
    METRICS = "metrics of the task"
    MIXED_PARAMETERS = "parameters of several types"
    NO_CHECKPOINTS = "checkpoint.enabled: false"
    NO_CUTS = "no tensor= in the task"
    NO_EVALUATIONS = "train.eval_every_epochs: null"
    NO_EVAL_LOSS = "neither a loss nor metrics"
    NO_FORWARD = "no forward"
    NO_LAYERS = "no layers= in the task, and no nn.Sequential"
    NO_REDUCER = "reduce.kind: none"
    NO_SPLIT = "no ctx.split"
    NO_VALIDATION = "no validation data"
    ONE_CYCLE = "schedule.kind: one_cycle"
    OTHER_OPTIMIZER = "an optimizer of the task that is not the model's"
    OVERLAP = "reduce.overlap: on"
    OWN_OPTIMIZER_STATE = "an optimizer that holds others, or keeps state outside its state dict"
    OWN_STEP = "the task's own step (PyTorch)"
    PARAMETER_HOOKS = "gradient hooks of a parameter"
    PER_RANK = "a PerRank in state= of the task"
    PIPELINE = "parallel.pipeline"
    OWN_PRECISION = "a model that computes in 32 or 64 bits all the same"
    PLATEAU = "schedule.plateau.metric"
    PROCESS_GROUPS = "reduce.kind: nccl"
    RANKS = "several ranks"
    RATE_HOOK = "a RateHook"
    RECOMPUTE = "train.recompute"
    SAMPLER = "the task's sampler"
    SCHEDULE = "schedule in the run file"
    SEVERAL_MODELS = "several models"
    SEVERAL_OPTIMIZERS = "several optimizers"
    SHARD = "parallel.shard: optimizer"
    """the optimizer's state (ZeRO-1); each rank updates its rows of the parameters, and all get them."""
    SHARD_GRADIENTS = "parallel.shard: gradients"
    """also the gradients (ZeRO-2, by FSDP2); layers are whole from the forward to the backward pass."""
    SHARD_PARAMETERS = "parallel.shard: parameters"
    """also the parameters (FSDP2); a layer is whole while it computes."""
    SHORT_BATCH = "a last batch with fewer samples than ranks"
    SPARSE_ADAM = "SparseAdam"
    SPARSE_ROWS = "an embedding with sparse=True"
    STEP_EPOCHS = "schedule.step_epochs"
    STEP_HOOKS = "step hooks of an optimizer"
    STREAM = "a stream as training data"
    SYNC_BATCHNORM = "train.sync_batchnorm"
    TASK_SCHEDULE = "the task's schedule"
    TENSOR = "parallel.tensor"
    TEST_STEP = "the model's own test_step (Keras)"
    TORCH_METRICS = "torchmetrics metrics"
    TORCH_SCHEDULER = "a TorchScheduler"
    TRAIN_METRICS = "train.metrics"
    TRAIN_STEP = "the model's own train_step (Keras)"
    UNKNOWN_OPTIMIZER = "an optimizer that may update a parameter from others"
    VALIDATION = "validation data"
    VERIFY = "reduce.verify_every_steps"
    VOLUMES = "layers for volumes, whose parameters have 5 dimensions"
    WARMUP = "a warm-up in the run file"
    WARMUP_EPOCHS = "schedule.warmup_epochs"
    WHOLE_TENSORS = "an optimizer that needs whole tensors"
    WORKERS = "data.workers"


class Trait(StrEnum):
    """What features have in common. A row that names a trait holds for each feature that has it."""

    ADDS_DENSE = auto()
    """Gradients are added up as whole tensors."""
    COMPRESSES = auto()
    """Gradients are exchanged in 16 bits."""
    COUNTS_EPOCHS = auto()
    """Means nothing without the length of an epoch."""
    DIVIDES = auto()
    """A rank has a part of the model or of its optimizers."""
    DIVIDES_OPTIMIZERS = auto()
    """A rank's optimizers update a part of the parameters, or rows of them."""
    EXCHANGES_IN_PASSES = auto()
    """Ranks exchange tensors or gradients while passes run, and so run the same ones."""
    GATHERS = auto()
    """A rank has rows of all parameters; layers are gathered to compute."""
    LOW_PRECISION = auto()
    """Passes are computed in 16 bits."""
    MEETS_INSIDE = auto()
    """Ranks exchange tensors within forward and backward passes."""
    NEEDS_EVALUATIONS = auto()
    """Needs evaluations before the end of the run."""
    NEEDS_VALIDATION = auto()
    """Needs metrics of validation data."""
    OF_PYTORCH = auto()
    """PyTorch alone has it."""
    REDUCE_SCATTERS = auto()
    """Each rank gets the sum of some gradients, not of all."""


DIVIDES_UPDATES = (Trait.DIVIDES, Trait.DIVIDES_OPTIMIZERS)
MEETS = (Trait.MEETS_INSIDE, Trait.EXCHANGES_IN_PASSES)
GATHERS = (*MEETS, *DIVIDES_UPDATES, Trait.REDUCE_SCATTERS, Trait.ADDS_DENSE, Trait.GATHERS)
PLANS: dict[Feature, tuple[Trait, ...]] = {
    Feature.TENSOR: (*MEETS, Trait.DIVIDES, Trait.ADDS_DENSE),
    Feature.PIPELINE: (*MEETS, *DIVIDES_UPDATES, Trait.ADDS_DENSE),
    Feature.SHARD_PARAMETERS: GATHERS,
    Feature.SHARD: (*DIVIDES_UPDATES, Trait.REDUCE_SCATTERS),
    Feature.SHARD_GRADIENTS: GATHERS,
}
TRAITS: dict[Feature, tuple[Trait, ...]] = {
    **dict.fromkeys((Feature.BF16_SUMS, Feature.FP16_SUMS), (Trait.COMPRESSES,)),
    **{plan: (*traits, Trait.OF_PYTORCH) for plan, traits in PLANS.items()},
    **dict.fromkeys(
        (Feature.EPOCHS, Feature.WARMUP_EPOCHS, Feature.STEP_EPOCHS, Feature.CYCLE_EPOCHS, Feature.EXPONENTIAL),
        (Trait.COUNTS_EPOCHS,),
    ),
    Feature.BEST: (Trait.NEEDS_VALIDATION,),
    **dict.fromkeys(
        (Feature.EARLY_STOP, Feature.PLATEAU, Feature.EVALUATION_SCHEDULER),
        (Trait.NEEDS_VALIDATION, Trait.NEEDS_EVALUATIONS),
    ),
    **dict.fromkeys((Feature.BF16, Feature.FP16), (Trait.LOW_PRECISION,)),
    **dict.fromkeys(
        (
            *(Feature.CHANNELS_LAST, Feature.COMPILE_MODE, Feature.CUDNN_BENCHMARK, Feature.RECOMPUTE),
            *(Feature.OVERLAP, Feature.PROCESS_GROUPS),
        ),
        (Trait.OF_PYTORCH,),
    ),
}
"""Of the features that have some. If several features of a run have a trait, sentences name the first one."""


def values_of(key: str) -> dict[str, Feature]:
    """The values of a key of the run file that are features."""
    return {one.removeprefix(f"{key}: "): one for one in Feature if one.startswith(f"{key}: ")}


Uses = Mapping[Feature, Any]
"""The features of a run, each with what a sentence says of it: a number, a name."""


def stated_by(sections: Mapping[str, Any]) -> dict[Feature, Any]:
    """Features that are keys of the run file, with their values; False for one of a value that the key does not have.

    Args:
        sections: by name.
    """
    found = {}
    for feature in Feature:
        key, _, word = feature.partition(": ")
        name, *path = key.split(".")
        if name in sections and path:
            *inner, last = path
            section = functools.reduce(getattr, inner, sections[name])
            value = getattr(section, last)
            found[feature] = value == word if word else value != getattr(type(section), last) and value
    return found


def used(given: Uses) -> dict[Feature, Any]:
    """Those that are not None, False, 0 or empty."""
    return {feature: value for feature, value in given.items() if value}


Rows = Mapping[tuple[Feature | Trait, ...], tuple[str, str]]
"""What is wrong and what to do, by features."""


def refusing(feature: Feature | Trait, stated: str, others: Mapping[Feature, tuple[str, str]]) -> Rows:
    """Rows of one feature and each of others, which say what is wrong and what to do."""
    return {(feature, other): (f"{stated}, and {what}", fix) for other, (what, fix) in others.items()}

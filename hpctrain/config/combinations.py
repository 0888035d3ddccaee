"""Features of runs, and the combinations of them that are refused.

Each combination that is refused is a row of a table, kept in the room or strategy's folder that it concerns, in
a module that ``MODULES`` names. Features that share no row go together. Whoever knows which features a run uses calls
``refuse``: ``Config`` for the run file, ``rank.problem`` for the task, the frameworks for what only they can see.
``python -m hpctrain.config.combinations`` prints the table of docs/combinations.md.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

from hpctrain.errors import UserError
from hpctrain.system import foreign_text

MODULES = (
    "hpctrain.reduce.refusals",
    "hpctrain.backends.torch.strategies.listed",
    "hpctrain.train.refusals",
    "hpctrain.backends.torch.refusals",
    "hpctrain.backends.tensorflow.refusals",
)
"""Each has ``ROWS``, and ``TRAITS`` of features that it knows. They import this module and no framework. This room is
below theirs, so it imports them by name, when a run is checked for the first time. Of several rows that a run breaks,
the first one is reported."""


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
    FP32_MODEL = "a Keras model that computes in float32"
    GATHER = "ctx.gather"
    GROUP_RATES = "a rate for each parameter group"
    HALF_PARAMETERS = "16-bit parameters"
    HOROVOD = "reduce.kind: horovod"
    INITIAL_WEIGHTS = "checkpoint.init_from"
    INT8_SUMS = "reduce.compression: int8"
    JOINT_LAYERS = "BatchNorm layers that normalise over all ranks"
    KERAS = "a KerasTask"
    KERAS_SCHEDULE = "a Keras schedule in the optimizer"
    LOCAL_SYNC = "sync.kind: local"
    LOSS_SCALE = "a LossScaleOptimizer"
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
    PLATEAU = "schedule.plateau.metric"
    PROCESS_GROUPS = "reduce.kind: nccl"
    RANKS = "several ranks"
    RATE_HOOK = "a RateHook"
    RECOMPUTE = "train.recompute"
    REGISTRY = "hpctrain track register"
    SAMPLER = "the task's sampler"
    SCHEDULE = "schedule in the run file"
    SEVERAL_MODELS = "several models"
    SEVERAL_OPTIMIZERS = "several optimizers"
    SHARD = "parallel.shard: optimizer"
    """the optimizer's state (ZeRO-1); each rank updates its rows of the parameters, and all get them."""
    SHARD_GRADIENTS = "parallel.shard: gradients"
    """also the summed gradients of these rows (ZeRO-2), which are exchanged during the backward pass."""
    SHARD_PARAMETERS = "parallel.shard: parameters"
    """also the parameters (FSDP2); a layer is whole while it computes."""
    SHARD_TABLES = "parallel.shard: tables"
    """the rows of the tables that the task marks in tensor= by vocabulary, and their state; vectors and
    gradients go from rank to rank."""
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
    HIDES_PARTS = auto()
    """Code outside the model sees layers, or rows of tables, of one rank alone."""
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


def values_of(key: str) -> dict[str, Feature]:
    """The values of a key of the run file that are features."""
    return {one.removeprefix(f"{key}: "): one for one in Feature if one.startswith(f"{key}: ")}


Uses = Mapping[Feature, Any]
"""The features of a run, each with what a sentence says of it: a number, a name."""


def used(given: Uses) -> dict[Feature, Any]:
    """Those that are not None, False, 0 or empty."""
    return {feature: value for feature, value in given.items() if value}


@dataclass(frozen=True)
class Row:
    """Features that cannot be combined."""

    features: tuple[Feature | Trait, ...]
    what: str
    """The sentence; {0} is what the run says of the first feature, and so on. Of a trait it is a clause about the
    feature that has it, such as ``parallel.tensor is 2``."""
    fix: str


Rows = Mapping[tuple[Feature | Trait, ...], tuple[str, str]]
"""As the rooms write them: what is wrong and what to do, by features."""


class Refused(UserError):
    """Features of a run cannot be combined."""

    def __init__(self, row: Row, what: str) -> None:
        super().__init__(what, row.fix)
        self.row = row

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.row, self.what)


@functools.cache
def table() -> tuple[Row, ...]:
    """All rows, in the order in which they are tried."""
    modules = map(importlib.import_module, MODULES)
    return tuple(Row(features, *texts) for module in modules for features, texts in module.ROWS.items())


def refusing(feature: Feature, stated: str, others: Mapping[Feature, tuple[str, str]]) -> Rows:
    """Rows of one feature and each of others, which say what is wrong and what to do."""
    return {(feature, other): (f"{stated}, and {what}", fix) for other, (what, fix) in others.items()}


@functools.cache
def traits() -> Mapping[Feature, tuple[Trait, ...]]:
    """Of the features that have some; the order is that of ``MODULES``."""
    found: dict[Feature, tuple[Trait, ...]] = {}
    for module in map(importlib.import_module, MODULES):
        for feature, more in getattr(module, "TRAITS", {}).items():
            found[feature] = found.get(feature, ()) + tuple(more)
    return found


def stated(feature: Feature, value: Any) -> str:
    """As a clause: ``parallel.tensor is 2``, ``reduce.overlap is on``, ``the task has a RateHook``."""
    key, _, given = feature.partition(": ")
    if not is_key(feature):
        return f"the task has {feature}"
    return f"{key} is {given or ('true' if value is True else repr(value))}"


def with_traits(uses: Uses) -> dict[Feature | Trait, Any]:
    """The features, and their traits, each with a clause about the first feature that has it."""
    found: dict[Any, Any] = {}
    for feature, own in traits().items():
        if feature in uses:
            found = {**dict.fromkeys(own, stated(feature, uses[feature])), **found}
    return {**found, **uses}


def clash(uses: Uses) -> Row | None:
    """The first row of which a run uses all features."""
    everything = with_traits(uses)
    return next((row for row in table() if all(feature in everything for feature in row.features)), None)


def refusal(uses: Uses) -> Refused:
    """The error of features that cannot be combined."""
    row = clash(uses)
    assert row is not None, "a row of the table says so"
    everything = with_traits(uses)
    return Refused(row, row.what.format(*(everything[feature] for feature in row.features)))


def refuse(uses: Uses) -> None:
    """Raises Refused if a run uses features that cannot be combined."""
    if clash(uses) is not None:
        raise refusal(uses)


def page() -> str:
    """The table, in Markdown."""
    lines = ["| feature | does not work with | instead |", "|---|---|---|"]
    for first, *others, fix in sorted([*map(shown, row.features), escaped(row.fix)] for row in table()):
        lines.append(f"| {first} | {', and '.join(others)} | {fix} |")
    return "\n".join(lines) + "\n"


def shown(feature: Feature | Trait) -> str:
    """As code, if it is a key of the run file; of a trait, all features that have it."""
    if isinstance(feature, Trait):
        *most, last = [shown(one) for one, own in traits().items() if feature in own]
        return f"{', '.join(most)} or {last}" if most else last
    return f"`{feature}`" if is_key(feature) else escaped(feature)


def is_key(feature: Feature) -> bool:
    """Whether a feature is one of the run file."""
    return re.fullmatch(r"[a-z_.]+\.[a-z_]+(: \w+)?", feature) is not None


def escaped(text: str) -> str:
    """Not taken for Markdown."""
    return re.sub(r"([\[\]*_`|])", r"\\\1", text)


if __name__ == "__main__":
    known_to_rows = importlib.import_module("hpctrain.config.combinations")  # not this copy of it
    foreign_text.show(known_to_rows.page(), end="")

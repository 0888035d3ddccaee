"""What goes with what: features of runs, and the combinations of them that are refused.

Each check of a combination is a row of ``TABLE``; features that share no row go together. Whoever knows which features
a run uses asks ``refuse``: ``Config`` for the run file, ``rank.features`` for the task, the frameworks for what only
they can see. docs/combinations.md shows the table, which ``python -m hpctrain.config.combinations`` prints, and
tests/unit/rank/test_combinations.py tries each row, and features that share none together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.errors import UserError
from hpctrain.system import foreign_text


class Feature(StrEnum):
    """Something that a run uses, or lacks; the value is its key in the run file, or how people call it."""

    ACCUMULATE = "train.accumulate"
    BEST = "checkpoint.best_metric"
    BF16 = "train.precision: bf16"
    BF16_SUMS = "reduce.compression: bf16"
    BUILT_OPTIMIZER = "a Keras optimizer that the task has built"
    CARRIED = "a CarriedState in state= of the task"
    CHANNELS_LAST = "train.channels_last"
    CLIP = "train.clip_norm"
    COMPILE = "train.compile"
    COMPILED_MODEL = "a model that the task compiles"
    COUPLED = "an optimizer whose update of a parameter depends on others"
    CYCLE_EPOCHS = "schedule.cycle_epochs"
    DENSIFY = "reduce.sparse: densify"
    EARLY_STOP = "train.early_stop.metric"
    EMA = "train.ema_decay"
    EPOCHS = "train.epochs"
    EVALUATION_SCHEDULER = "TorchScheduler(every='evaluation')"
    EXPONENTIAL = "schedule.kind: exponential"
    EXTRA_STATE = "modules with extra state"
    FP16 = "train.precision: fp16"
    FP16_SUMS = "reduce.compression: fp16"
    FP32_MODEL = "a Keras model that computes in float32"
    GATHER = "ctx.gather"
    GLOBAL_CLIPNORM = "global_clipnorm of a Keras optimizer"
    GRASPED_MODEL = "a loss, forward or metric that holds parts of the model"
    GROUP_RATES = "a rate for each parameter group"
    HALF_PARAMETERS = "parameters of 16 bits"
    HOROVOD = "reduce.kind: horovod"
    INITIAL_WEIGHTS = "checkpoint.init_from"
    JOINT_LAYERS = "BatchNorm layers that normalise over all ranks"
    KERAS = "a KerasTask"
    KERAS_SCHEDULE = "a Keras schedule in the optimizer"
    LOSS_SCALE = "a LossScaleOptimizer"
    MAX_NORM = "an embedding with max_norm"
    METRICS = "metrics of the task"
    MIXED_PARAMETERS = "parameters of several types"
    NO_CHECKPOINTS = "checkpoint.enabled: false"
    NO_EVALUATIONS = "train.eval_every_epochs: null"
    NO_CUTS = "no tensor= in the task"
    NO_FORWARD = "no forward"
    NO_JUDGE = "nothing that says how to evaluate"
    NO_LAYERS = "no layers= in the task, and no nn.Sequential"
    NO_REDUCER = "reduce.kind: none"
    NO_SPLIT = "no ctx.split"
    NO_VALIDATION = "no validation data"
    ONE_CYCLE = "schedule.kind: one_cycle"
    OTHER_OPTIMIZER = "an optimizer of the task that is not the model's"
    OVERLAP = "reduce.overlap: on"
    OWN_OPTIMIZER_STATE = "an optimizer that holds others, or state outside of its state"
    OWN_STEP = "a step of the task's own (PyTorch)"
    PARAMETER_HOOKS = "hooks of a parameter's gradient"
    PER_RANK = "a PerRank in state= of the task"
    PIPELINE = "parallel.pipeline"
    PLATEAU = "schedule.plateau.metric"
    RANKS = "several ranks"
    RATE_HOOK = "a RateHook"
    RECOMPUTE = "train.recompute"
    REGISTRY = "hpctrain track register"
    SAMPLER = "the task's sampler"
    SCHEDULE = "schedule in the run file"
    SEVERAL_MODELS = "several models"
    SEVERAL_OPTIMIZERS = "several optimizers"
    SHARD = "parallel.shard: optimizer"
    SHARD_PARAMETERS = "parallel.shard: parameters"
    SHARD_TABLES = "parallel.shard: tables"
    SHORT_BATCH = "a last batch with fewer samples than ranks"
    SPARSE_ADAM = "SparseAdam"
    SPARSE_ROWS = "an embedding with sparse=True"
    STAGED_ENVIRONMENT = "launch.stage_environment"
    STEP_EPOCHS = "schedule.step_epochs"
    STEP_HOOKS = "hooks of an optimizer's step"
    STREAM = "a stream as training data"
    SYNC_BATCHNORM = "train.sync_batchnorm"
    TABLES = "large tables of embeddings (Keras)"
    TASK_SCHEDULE = "schedule of the task"
    TENSOR = "parallel.tensor"
    TEST_STEP = "an evaluation by the model's own steps"
    TORCH_METRICS = "metrics of torchmetrics"
    TORCH_SCHEDULER = "a TorchScheduler"
    TRAIN_STEP = "a train_step of the model's own (Keras)"
    VALIDATION = "validation data"
    VALUELESS = "parameters on the meta device"
    VERIFY = "reduce.verify_every_steps"
    VOLUMES = "layers for volumes, whose parameters have 5 dimensions"
    WARMUP = "a warm-up in the run file"
    WARMUP_EPOCHS = "schedule.warmup_epochs"
    WHOLE_TENSORS = "an optimizer that does not go by rows"
    WORKERS = "data.workers"
    WRAP = "launch.slurm.wrap"


Uses = Mapping[Feature, Any]
"""The features of a run, each with what a sentence says of it: a number, a name."""


def used(given: Uses) -> dict[Feature, Any]:
    """Those that are not None, False, 0 or empty."""
    return {feature: value for feature, value in given.items() if value}


@dataclass(frozen=True)
class Row:
    """Features that do not go together."""

    features: tuple[Feature, ...]
    what: str
    """The sentence; {0} is what the run says of the first feature, and so on."""
    fix: str


class Refused(UserError):
    """Features of a run do not go together."""

    def __init__(self, row: Row, what: str) -> None:
        super().__init__(what, row.fix)
        self.row = row

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.row, self.what)


ONE_RATE = "give schedule: in the run file, or schedule=lambda step: factor, which apply to all optimizers"
WATCHED = (Feature.EARLY_STOP, Feature.BEST, Feature.PLATEAU)
OF_STREAMS = {
    Feature.EPOCHS: "give train.steps",
    Feature.WARMUP_EPOCHS: "give schedule.warmup_steps",
    Feature.STEP_EPOCHS: "choose another schedule.kind",
    Feature.CYCLE_EPOCHS: "choose another schedule.kind",
    Feature.EXPONENTIAL: "choose another schedule.kind",
    Feature.WORKERS: "set data.workers to 0: one thread reads a stream",
    Feature.SAMPLER: "leave the sampler out: a stream has one order",
}
OF_TRAIN_STEPS = {
    Feature.ACCUMULATE: (
        "train.accumulate: {1}",
        "give the optimizer gradient_accumulation_steps, or leave train.accumulate out",
    ),
    Feature.CLIP: (
        "train.clip_norm: {1}",
        "give the optimizers global_clipnorm: they see the gradient of the global batch",
    ),
    Feature.FP16: (
        "train.precision: fp16",
        "choose bf16 or fp32: fp16 needs a loss scale, which only hpctrain's own step has",
    ),
    Feature.COMPILE: ("train.compile", "leave train.compile out: ranks meet inside of the step"),
    Feature.JOINT_LAYERS: (
        "BatchNormalization over all ranks",
        "leave train.sync_batchnorm and synchronized=True out: each rank then normalises over its own samples",
    ),
}

OF_TENSOR_GROUPS = {
    Feature.KERAS: (
        "the task is a KerasTask: keras.distribution does nothing on TensorFlow, and says nothing",
        "set parallel.tensor to 1, or write the model in PyTorch",
    ),
    Feature.NO_CUTS: (
        "the task does not say how its layers are cut",
        "return TorchTask(..., tensor={'blocks.*.up': hpctrain.columns, ...}), or set parallel.tensor to 1",
    ),
    Feature.OWN_STEP: ("the task has a step of its own", "give the task loss= and optimizer=, without step="),
    Feature.COMPILE: ("train.compile is true: ranks meet inside of the model", "leave train.compile out"),
    Feature.COMPILED_MODEL: (
        "{1} is compiled, and ranks meet inside of the model",
        "leave torch.compile and torch.jit out of the task",
    ),
    Feature.JOINT_LAYERS: (
        "{1} normalises over the samples of all ranks",
        "leave train.sync_batchnorm out, or normalise by LayerNorm",
    ),
    Feature.SPARSE_ROWS: (
        "{1} has sparse gradients",
        "leave sparse=True out: hpctrain.vocabulary shares out the rows of a large table",
    ),
    Feature.STEP_HOOKS: (
        "{1} has hooks of its step (register_step_pre_hook), which see a part of what is cut",
        "leave the hooks out: train.clip_norm clips by the whole gradient; hooks= of the task are called after updates",
    ),
}
OF_STAGES = {
    Feature.KERAS: ("the task is a KerasTask", "set parallel.pipeline to 1, or write the model in PyTorch"),
    Feature.OWN_STEP: (
        "the task has a step of its own, which is not cut into passes forward and back",
        "give the task loss= and optimizer=, without step=",
    ),
    Feature.NO_LAYERS: (
        "the task does not say what the layers of its model are",
        "return TorchTask(..., layers=lambda model: [model.embed, *model.blocks, model.head]), or an nn.Sequential",
    ),
    Feature.COMPILE: ("train.compile is true: ranks meet inside of the model", "leave train.compile out"),
    Feature.COMPILED_MODEL: (
        "{1} is compiled, so that nobody sees which parameters its layers have",
        "leave torch.compile and torch.jit out of the task",
    ),
    Feature.JOINT_LAYERS: (
        "{1} normalises over the samples of all ranks, which pass micro-batches at their own times",
        "leave train.sync_batchnorm out: each rank then normalises over its micro-batches",
    ),
    Feature.SPARSE_ROWS: ("{1} has sparse gradients", "leave sparse=True out"),
    Feature.OWN_OPTIMIZER_STATE: (
        "{1} holds other optimizers, or state that is in neither its state nor its param_groups",
        "give the task a plain optimizer, or a list of them",
    ),
    Feature.STEP_HOOKS: (
        "{1} has hooks of its step (register_step_pre_hook), which see the gradients of one stage",
        "leave the hooks out: train.clip_norm clips by the whole gradient; hooks= of the task are called after updates",
    ),
    Feature.COUPLED: (
        "{1} updates a parameter by what it finds in others, of which each stage has some",
        "use another optimizer, such as AdamW",
    ),
    Feature.EXTRA_STATE: (
        "a {1} of the task has extra state (get_extra_state), of which each stage would have another one",
        "keep it in buffers",
    ),
    Feature.GRASPED_MODEL: (
        "{1} of the task holds the model or a part of it, and each stage has other layers: penalties, for one, would "
        "be those of one stage",
        "let it work on its arguments alone: what it needs of the layers the last one returns, and weight decay is the "
        "optimizer's",
    ),
    Feature.PER_RANK: (
        "state {1!r} of the task is each rank's own: layers and loss would change it on different ranks",
        "keep it in buffers of the model, or change it in hooks and without PerRank",
    ),
}
SHARDED = "parallel.shard is optimizer"
DIVIDED = "parallel.shard is parameters"
OF_SHARDS = {
    Feature.HOROVOD: ("gradients would travel by Horovod to all ranks", "set reduce.kind: auto, or leave it out"),
    Feature.OVERLAP: ("gradients travel after the backward pass", "leave reduce.overlap at auto"),
    Feature.BF16_SUMS: ("gradients travel as they are", "leave reduce.compression out"),
    Feature.FP16_SUMS: ("gradients travel as they are", "leave reduce.compression out"),
    Feature.SPARSE_ADAM: (
        "SparseAdam, which updates {1}, takes sparse gradients alone",
        "leave parallel.shard out, or use Adam",
    ),
    Feature.OWN_OPTIMIZER_STATE: (
        "{1} holds other optimizers, or state that is in neither its state nor its param_groups, which cannot be cut",
        "leave parallel.shard out, or give the task plain optimizers",
    ),
    Feature.STEP_HOOKS: (
        "{1} has hooks of its step (register_step_pre_hook), which see gradients and updates of a part",
        "leave the hooks out: train.clip_norm clips by the whole gradient, train.ema_decay averages weights, and "
        "hooks= of the task are called after updates",
    ),
}
OF_KERAS_SHARDS = {
    Feature.TRAIN_STEP: (
        "{1} has a train_step of its own, in which its optimizers update whole weights",
        "leave parallel.shard out, or give the task loss= and optimizer=, and the model no train_step",
    ),
    Feature.BUILT_OPTIMIZER: (
        "{1} was built by the task, with state for whole weights",
        "leave optimizer.build out of the task, or parallel.shard",
    ),
    Feature.GLOBAL_CLIPNORM: (
        "{1} has global_clipnorm, and would clip by the gradients of a part",
        "set train.clip_norm in its place, which clips by the whole gradient, or leave parallel.shard out",
    ),
}
OF_PARAMETER_SHARDS = OF_SHARDS | {
    Feature.KERAS: ("the task is a KerasTask", "set parallel.shard: optimizer, or write the model in PyTorch"),
    Feature.SEVERAL_MODELS: (
        "the task has several models, none of which calls the others",
        "give the task one model, or set parallel.shard: optimizer",
    ),
    Feature.SPARSE_ROWS: ("{1} has sparse gradients", "leave sparse=True out, or set parallel.shard: optimizer"),
    Feature.OWN_STEP: (
        "the task has a step of its own, whose passes other ranks could not follow",
        "give the task loss= and optimizer=, without step=, or set parallel.shard: optimizer",
    ),
    **{
        feature: OF_TENSOR_GROUPS[feature]
        for feature in (Feature.COMPILE, Feature.COMPILED_MODEL, Feature.JOINT_LAYERS)
    },
    Feature.CHANNELS_LAST: (
        "train.channels_last is true: rows of a parameter would not lie one behind the other",
        "leave train.channels_last out, or set parallel.shard: optimizer",
    ),
    Feature.PIPELINE: (
        "parallel.pipeline is {1}, which would gather each layer for each of its micro-batches",
        "set parallel.pipeline to 1, or parallel.shard: optimizer",
    ),
    Feature.VERIFY: (
        "reduce.verify_every_steps is {1}: each rank has rows of its own, and no other one to compare them with",
        "leave reduce.verify_every_steps out",
    ),
    Feature.MIXED_PARAMETERS: (
        "the model has parameters of {1}, which do not travel together",
        "give all parameters that are trained one type, or set parallel.shard: optimizer",
    ),
    Feature.PARAMETER_HOOKS: (
        "{1} has hooks of its gradient (register_hook), which would never be called",
        "leave the hooks out: train.clip_norm clips gradients, and the optimizer's groups have rates of their own; or "
        "set parallel.shard: optimizer",
    ),
    Feature.VALUELESS: (
        "the task made {1} on the meta device: rows are made of whole parameters",
        "make the model with values, or share it out by parallel.tensor or parallel.pipeline",
    ),
    Feature.TORCH_METRICS: (
        "{1} of the task is of torchmetrics, which would itself ask all ranks as soon as torch.distributed is open",
        "write it as an hpctrain.Metric or as a function, or set parallel.shard: optimizer",
    ),
}
OF_TABLES = {
    Feature.KERAS: ("the task is a KerasTask", "leave parallel.shard out, or write the model in PyTorch"),
    Feature.NO_CUTS: (
        "the task does not say which tables are shared out",
        "return TorchTask(..., tensor={'tables.*': hpctrain.vocabulary}), or leave parallel.shard out",
    ),
    Feature.TENSOR: (
        "parallel.tensor is {1}, which shares out the rows of tables itself",
        "set parallel.tensor to 1, or leave parallel.shard out",
    ),
    Feature.PIPELINE: (
        "parallel.pipeline is {1}, whose stages have other tables, and come to them at other times",
        "set parallel.pipeline to 1, or leave parallel.shard out",
    ),
    Feature.OWN_OPTIMIZER_STATE: OF_STAGES[Feature.OWN_OPTIMIZER_STATE],
    Feature.GRASPED_MODEL: (
        "{1} of the task holds the model or a part of it, and each rank has other rows of its tables: penalties, for "
        "one, would be those of a rank's",
        "let it work on its arguments alone; weight decay is the optimizer's",
    ),
    **{
        feature: OF_TENSOR_GROUPS[feature]
        for feature in (Feature.OWN_STEP, Feature.COMPILE, Feature.COMPILED_MODEL, Feature.JOINT_LAYERS)
    },
    Feature.STEP_HOOKS: OF_TENSOR_GROUPS[Feature.STEP_HOOKS],
}

TABLE: tuple[Row, ...] = (
    # the run file alone
    Row(
        (Feature.COMPILE, Feature.SYNC_BATCHNORM),
        "train.compile and train.sync_batchnorm are both true: compiled layers cannot meet other ranks",
        "leave train.compile or train.sync_batchnorm out of the run file",
    ),
    Row(
        (Feature.COMPILE, Feature.RECOMPUTE),
        "train.compile and train.recompute are both given: the compiler decides itself what it computes again",
        "leave train.compile or train.recompute out of the run file",
    ),
    Row(
        (Feature.ONE_CYCLE, Feature.WARMUP),
        "schedule.kind is one_cycle, which has a climb of its own, but a warm-up is given",
        "remove the warm-up; set schedule.climb_share and start_factor",
    ),
    Row(
        (Feature.HOROVOD, Feature.BF16_SUMS),
        "Horovod cannot sum bfloat16",
        "set reduce.compression: fp16, or reduce.kind: mpi",
    ),
    Row(
        (Feature.STAGED_ENVIRONMENT, Feature.WRAP),
        "launch.stage_environment has no use with launch.slurm.wrap",
        "leave launch.stage_environment out: an image is one file",
    ),
    Row(
        (Feature.INITIAL_WEIGHTS, Feature.NO_CHECKPOINTS),
        "checkpoint.init_from is {0}, but checkpoint.enabled is false, so that nothing is loaded",
        "leave checkpoint.enabled out; checkpoint.interval: none saves at the end alone",
    ),
    *(
        Row(
            (feature, Feature.NO_EVALUATIONS),
            f"{feature} is {{0!r}}, but nothing is evaluated before the end of the run",
            "set train.eval_every_epochs or train.eval_every_steps",
        )
        for feature in (Feature.EARLY_STOP, Feature.PLATEAU)
    ),
    Row(
        (Feature.NO_REDUCER, Feature.RANKS),
        "reduce.kind is none but there are {1} ranks, which would train apart",
        "set reduce.kind: auto, or start one rank",
    ),
    Row(
        (Feature.MAX_NORM, Feature.RANKS),
        "{0} is an embedding with max_norm, which changes rows in the forward pass: each of the {1} ranks would change "
        "those of its own samples alone",
        "leave max_norm out, and bound the rows in a hook of the task, after each update",
    ),
    Row(
        (Feature.VALUELESS, Feature.NO_CHECKPOINTS),
        "the task made {0} on the meta device, but checkpoint.enabled is false, so that it never gets values",
        "leave checkpoint.enabled out and set checkpoint.init_from; or make the model with values",
    ),
    # models that are shared out
    *(
        Row((Feature.TENSOR, feature), f"parallel.tensor is {{0}}, and {what}", fix)
        for feature, (what, fix) in OF_TENSOR_GROUPS.items()
    ),
    *(
        Row((Feature.PIPELINE, feature), f"parallel.pipeline is {{0}}, and {what}", fix)
        for feature, (what, fix) in OF_STAGES.items()
    ),
    *(
        Row((shard, feature), f"{given}, and {what}", fix)
        for shard, given, of in (
            (Feature.SHARD, SHARDED, OF_SHARDS | OF_KERAS_SHARDS),
            (Feature.SHARD_PARAMETERS, DIVIDED, OF_PARAMETER_SHARDS),
            (Feature.SHARD_TABLES, "parallel.shard is tables", OF_TABLES),
        )
        for feature, (what, fix) in of.items()
    ),
    *(
        Row(
            (shard, Feature.COUPLED, Feature.RANKS),
            f"{given}, and {{1}} updates a parameter by what it finds in others, so that ranks that have a part of "
            "them would train another model",
            "leave parallel.shard out, or use another optimizer, such as AdamW",
        )
        for shard, given in ((Feature.SHARD, SHARDED), (Feature.SHARD_PARAMETERS, DIVIDED))
    ),
    Row(
        (Feature.SHARD_PARAMETERS, Feature.WHOLE_TENSORS, Feature.RANKS),
        f"{DIVIDED}, and {{1}}",
        "use an optimizer that updates each element by itself, such as AdamW, or set parallel.shard: optimizer",
    ),
    # streams
    *(
        Row(
            (Feature.STREAM, feature),
            f"the training data of task {{0}} is a stream, for which {feature} means nothing",
            fix,
        )
        for feature, fix in OF_STREAMS.items()
    ),
    # validation
    *(
        Row(
            (feature, Feature.NO_VALIDATION),
            f"{feature} is {{0!r}}, but task {{1}} has no validation data",
            f"give the task validation data (validation=...), or remove {feature}",
        )
        for feature in WATCHED
    ),
    Row(
        (Feature.EVALUATION_SCHEDULER, Feature.NO_VALIDATION),
        "the task's TorchScheduler is stepped by evaluations, but task {1} has no validation data",
        "give the task validation data (validation=...), or write TorchScheduler(..., every='epoch')",
    ),
    Row(
        (Feature.EVALUATION_SCHEDULER, Feature.NO_EVALUATIONS),
        "the task's TorchScheduler is stepped by evaluations, and there is none before the end of the run",
        "set train.eval_every_epochs or train.eval_every_steps",
    ),
    # learning rates
    Row(
        (Feature.SCHEDULE, Feature.TASK_SCHEDULE),
        "both the run file's schedule and the task's set the learning rate",
        "remove schedule: from the run file, or schedule= from the task",
    ),
    *(
        Row(
            (Feature.KERAS_SCHEDULE, feature),
            f"both the {whose}'s schedule and the Keras optimizer's own change the learning rate",
            "give the optimizer a number as its learning rate, or leave the schedule to it",
        )
        for feature, whose in ((Feature.SCHEDULE, "run file"), (Feature.TASK_SCHEDULE, "task"))
    ),
    Row(
        (Feature.KERAS_SCHEDULE, Feature.RATE_HOOK),
        "both the Keras optimizer's own schedule and the hook {1} set the learning rate",
        "give the optimizer a number as its learning rate, or leave the hook out",
    ),
    Row(
        (Feature.KERAS, Feature.TORCH_SCHEDULER),
        "a KerasTask has a TorchScheduler",
        "give the optimizer a Keras schedule as its learning rate, or the task a function of the step",
    ),
    Row(
        (Feature.KERAS, Feature.GROUP_RATES),
        "the task's schedule gives a factor for each parameter group",
        "return one number: a Keras optimizer has one learning rate",
    ),
    Row(
        (Feature.TORCH_SCHEDULER, Feature.SEVERAL_OPTIMIZERS),
        "a TorchScheduler sets the rates of one optimizer, and the task has a dict of them",
        ONE_RATE,
    ),
    Row(
        (Feature.TORCH_SCHEDULER, Feature.RATE_HOOK),
        "both a TorchScheduler and the hook {1} set the learning rate",
        "leave schedule= or the hook out of the task; a RateHook goes with a function of the step, and with schedule:",
    ),
    # state of each place in a batch
    Row(
        (Feature.CARRIED, Feature.ACCUMULATE),
        "{0} is carried from batch to batch, and train.accumulate is {1}: a micro-batch would go on from the samples "
        "of another one",
        "leave train.accumulate at 1",
    ),
    # steps of one's own
    Row(
        (Feature.OWN_STEP, Feature.SHORT_BATCH, Feature.RANKS),
        "an own step runs on all {2} ranks, and the last batch of an epoch has only {1} samples",
        "set data.drop_last: true, or choose another train.global_batch",
    ),
    Row(
        (Feature.OWN_STEP, Feature.ACCUMULATE, Feature.NO_SPLIT),
        "train.accumulate is {1}, but step never calls ctx.split",
        "write `for part in ctx.split(batch): ...` around the backward passes, or set train.accumulate: 1",
    ),
    Row(
        (Feature.OWN_STEP, Feature.ACCUMULATE, Feature.GATHER),
        "ctx.gather: with train.accumulate: {1} a loss over the global batch would be one over a part of it{2}",
        "set train.accumulate: 1",
    ),
    Row(
        (Feature.OWN_STEP, Feature.VALIDATION, Feature.NO_JUDGE),
        "the task has validation data, but neither loss nor metrics to judge them by",
        "give metrics={...} or loss=, each a function(outputs, batch) of what forward returns",
    ),
    Row(
        (Feature.SEVERAL_MODELS, Feature.VALIDATION, Feature.NO_FORWARD),
        "the task has validation data and several models, but no forward",
        "say what is evaluated: forward=lambda models, batch: models[...](batch[...])",
    ),
    Row(
        (Feature.SEVERAL_MODELS, Feature.REGISTRY),
        "the task has several models ({0}), and a registered model is one",
        "write their weights with hpctrain ckpt export",
    ),
    Row(
        (Feature.TRAIN_STEP, Feature.OTHER_OPTIMIZER),
        "{0} has a train_step of its own, which does not use optimizer= of the task",
        "leave optimizer= out of the task, and compile the model with it: model.compile(optimizer=...)",
    ),
    *(
        Row((Feature.TRAIN_STEP, feature), f"{what} does not go with the train_step of {{0}}", fix)
        for feature, (what, fix) in OF_TRAIN_STEPS.items()
    ),
    Row(
        (Feature.TRAIN_STEP, Feature.METRICS, Feature.TEST_STEP),
        "metrics= of the task does not go with the train_step of {0}",
        "return them from test_step, or leave test_step out and give the task loss= and metrics=",
    ),
    Row(
        (Feature.TRAIN_STEP, Feature.VALIDATION, Feature.NO_JUDGE),
        "{0} has a train_step of its own and the task has validation data, but nothing says how to evaluate",
        "write test_step(self, data), give the task loss=, or leave validation= out",
    ),
    # models and optimizers
    Row(
        (Feature.KERAS, Feature.LOSS_SCALE),
        "the optimizer is a LossScaleOptimizer",
        "give the task the optimizer inside it: train.precision: fp16 scales the loss by itself",
    ),
    Row(
        (Feature.COMPILE, Feature.JOINT_LAYERS, Feature.RANKS),
        "train.compile is true, and {1} normalises over all ranks",
        "leave train.compile out, or use plain BatchNorm: not SyncBatchNorm, and no synchronized=True",
    ),
    Row(
        (Feature.JOINT_LAYERS, Feature.COMPILED_MODEL, Feature.RANKS),
        "{1} is compiled, and train.sync_batchnorm cannot reach into it",
        "leave torch.compile and torch.jit out of the task",
    ),
    Row(
        (Feature.SPARSE_ADAM, Feature.DENSIFY),
        "SparseAdam updates {0}, and reduce.sparse is densify, which leaves it no sparse gradient",
        "leave reduce.sparse at auto, or use Adam",
    ),
    Row(
        (Feature.EMA, Feature.HALF_PARAMETERS),
        "train.ema_decay is given, but the model's parameters have 16 bits, which hold no slow average",
        "keep the parameters in float32: train.precision computes in 16 bits",
    ),
    Row(
        (Feature.FP16, Feature.HALF_PARAMETERS),
        "train.precision is fp16, whose loss scale needs gradients in float32, and the model's parameters have 16 bits",
        "keep the parameters in float32, or leave train.precision out",
    ),
    Row(
        (Feature.CHANNELS_LAST, Feature.VOLUMES),
        "train.channels_last is for images, and parameter {1} has 5 dimensions",
        "leave train.channels_last out",
    ),
    Row(
        (Feature.KERAS, Feature.CHANNELS_LAST),
        "train.channels_last is for PyTorch, and the task is a KerasTask",
        "leave train.channels_last out: Keras layers have a data_format",
    ),
    Row(
        (Feature.KERAS, Feature.RECOMPUTE),
        "train.recompute is for layers of PyTorch, and the model is one of Keras",
        "leave train.recompute out of the run file",
    ),
    Row(
        (Feature.KERAS, Feature.OVERLAP),
        "reduce.overlap is on, but Keras gradients travel after the backward pass",
        "leave reduce.overlap at auto",
    ),
    *(
        Row(
            (feature, Feature.FP32_MODEL),
            f"{feature.replace(':', ' is')} but no layer of the Keras model computes in it",
            f"call keras.config.set_dtype_policy({policy!r}) before the model is made",
        )
        for feature, policy in ((Feature.BF16, "mixed_bfloat16"), (Feature.FP16, "mixed_float16"))
    ),
)


def clash(uses: Uses) -> Row | None:
    """The first row of which a run uses all features."""
    return next((row for row in TABLE if all(feature in uses for feature in row.features)), None)


def refusal(uses: Uses) -> Refused:
    """The error of features that do not go together."""
    row = clash(uses)
    assert row is not None, "a row of the table says so"
    return Refused(row, row.what.format(*(uses[feature] for feature in row.features)))


def refuse(uses: Uses) -> None:
    """Raises Refused if a run uses features that do not go together."""
    if clash(uses) is not None:
        raise refusal(uses)


def page() -> str:
    """The table, in Markdown."""
    lines = ["| what | does not go with | instead |", "|---|---|---|"]
    for first, *others, fix in sorted([*map(shown, row.features), escaped(row.fix)] for row in TABLE):
        lines.append(f"| {first} | {', and '.join(others)} | {fix} |")
    return "\n".join(lines) + "\n"


def shown(feature: Feature) -> str:
    """As code, if it is a key of the run file."""
    return f"`{feature}`" if re.fullmatch(r"[a-z_.]+\.[a-z_]+(: \w+)?", feature) else escaped(feature)


def escaped(text: str) -> str:
    """Not taken for Markdown."""
    return re.sub(r"([\[\]*_`|])", r"\\\1", text)


if __name__ == "__main__":
    foreign_text.show(page(), end="")

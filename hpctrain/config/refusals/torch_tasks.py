"""Combinations of features that PyTorch tasks do not support."""

from __future__ import annotations

from hpctrain.config.features import Feature, Rows

ROWS: Rows = {
    (Feature.COMPILE, Feature.SYNC_BATCHNORM): (
        "train.compile and train.sync_batchnorm are both true: compiled layers cannot communicate with other ranks",
        "leave train.compile or train.sync_batchnorm out of the run file",
    ),
    (Feature.COMPILE, Feature.JOINT_LAYERS, Feature.RANKS): (
        "train.compile is true, and {1} normalises over all ranks",
        "leave train.compile out, or use plain BatchNorm: not SyncBatchNorm, and no synchronized=True",
    ),
    (Feature.JOINT_LAYERS, Feature.COMPILED_MODEL, Feature.RANKS): (
        "{1} is compiled, and train.sync_batchnorm cannot reach into it",
        "leave torch.compile and torch.jit out of the task",
    ),
    (Feature.TORCH_SCHEDULER, Feature.SEVERAL_OPTIMIZERS): (
        "a TorchScheduler sets the rates of one optimizer, and the task has a dict of them",
        "give schedule: in the run file, or schedule=lambda step: factor, which apply to all optimizers",
    ),
    (Feature.TORCH_SCHEDULER, Feature.RATE_HOOK): (
        "both a TorchScheduler and the hook {1} set the learning rate",
        "leave schedule= or the hook out of the task; a RateHook goes with a function of the step, and with schedule:",
    ),
    # a custom step
    (Feature.OWN_STEP, Feature.SHORT_BATCH, Feature.RANKS): (
        "the task's own step runs on all {2} ranks, and the last batch of an epoch has only {1} samples",
        "set data.drop_last: true, or choose another train.global_batch",
    ),
    (Feature.OWN_STEP, Feature.ACCUMULATE, Feature.NO_SPLIT): (
        "train.accumulate is {1}, but step never calls ctx.split",
        "write `for part in ctx.split(batch): ...` around the backward passes, or set train.accumulate: 1",
    ),
    (Feature.OWN_STEP, Feature.ACCUMULATE, Feature.GATHER): (
        "ctx.gather: with train.accumulate: {1} a loss over the global batch would cover only a part of it{2}",
        "set train.accumulate: 1",
    ),
    (Feature.OWN_STEP, Feature.TRAIN_METRICS): (
        "train.metrics is given, and the task has its own step, whose outputs only it knows",
        "leave train.metrics out, and report them in the step: ctx.log('accuracy', value)",
    ),
    # models and optimizers
    (Feature.MAX_NORM, Feature.RANKS): (
        "{0} is an embedding with max_norm, which changes rows in the forward pass: each of the {1} ranks would change "
        "only those of its samples",
        "leave max_norm out, and bound the rows in a hook of the task, after each update",
    ),
    (Feature.SPARSE_ADAM, Feature.DENSIFY): (
        "SparseAdam updates {0}, and reduce.sparse is densify, which leaves it no sparse gradient",
        "leave reduce.sparse at auto, or use Adam",
    ),
    (Feature.EMA, Feature.HALF_PARAMETERS): (
        "train.ema_decay is given, but the model's parameters have 16 bits, too few for a slow average",
        "keep the parameters in float32: train.precision computes in 16 bits",
    ),
    (Feature.FP16, Feature.HALF_PARAMETERS): (
        "train.precision is fp16, whose loss scale needs gradients in float32, and the model's parameters have 16 bits",
        "keep the parameters in float32, or leave train.precision out",
    ),
    (Feature.CHANNELS_LAST, Feature.VOLUMES): (
        "train.channels_last is for images, and {1} has 5 dimensions",
        "leave train.channels_last out",
    ),
}

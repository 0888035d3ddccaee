"""Combinations of features that Keras tasks do not support, and features that only PyTorch has."""

from __future__ import annotations

from hpctrain.config.features import Feature, Rows, Trait, refusing

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
    Feature.TRAIN_METRICS: ("train.metrics", "leave train.metrics out: what train_step returns is reported"),
    Feature.COMPILE: ("train.compile", "leave train.compile out: ranks communicate inside the step"),
    Feature.JOINT_LAYERS: (
        "BatchNormalization over all ranks",
        "leave train.sync_batchnorm and synchronized=True out: each rank then normalises over its own samples",
    ),
}
CUTS = "set parallel.shard, or write the model in PyTorch: a Keras model says nothing of splitting layers"
SCALED = (
    "the optimizer is a LossScaleOptimizer, or has a loss_scale_factor",
    "give the task the optimizer inside it, or leave the factor out: train.precision: fp16 scales the loss by itself",
)
WITH_TORCH = {
    Feature.CHANNELS_LAST: ("train.channels_last is true", "leave it out, and give Keras layers a data_format"),
    Feature.JOINT_LAYERS: (
        "{1} would normalise over all ranks",
        "leave train.sync_batchnorm and synchronized=True out, or set KERAS_BACKEND=tensorflow",
    ),
    Feature.LOSS_SCALE: SCALED,
    Feature.PIPELINE: ("parallel.pipeline is {1}", CUTS),
    Feature.RECOMPUTE: ("train.recompute is given", "leave it out: PyTorch sees a Keras model as a single module"),
    Feature.TENSOR: ("parallel.tensor is {1}", CUTS),
    Feature.TRAIN_STEP: (
        "{1} overrides a step of keras.Model or a part of one",
        "set KERAS_BACKEND=tensorflow, or return a TorchTask whose step calls the model: it is a torch.nn.Module",
    ),
}
ROWS: Rows = {
    **refusing(Feature.KERAS_ON_TORCH, "the Keras model trains on PyTorch", WITH_TORCH),
    (Trait.OF_PYTORCH, Feature.KERAS): (
        "{0}, which is for PyTorch, and the task is a KerasTask on TensorFlow",
        "leave it out, or set KERAS_BACKEND=torch in the environment of the run",
    ),
    (Feature.KERAS, Feature.TORCH_SCHEDULER): (
        "a KerasTask has a TorchScheduler",
        "give the optimizer a Keras schedule as its learning rate, or the task a function of the step",
    ),
    (Feature.KERAS, Feature.GROUP_RATES): (
        "the task's schedule gives a factor for each parameter group",
        "return one number: a Keras optimizer has one learning rate",
    ),
    **{
        (Feature.KERAS_SCHEDULE, feature): (
            f"both the {whose}'s schedule and the Keras optimizer's own change the learning rate",
            "give the optimizer a number as its learning rate, or leave the schedule to it",
        )
        for feature, whose in ((Feature.SCHEDULE, "run file"), (Feature.TASK_SCHEDULE, "task"))
    },
    (Feature.KERAS_SCHEDULE, Feature.RATE_HOOK): (
        "both the Keras optimizer's own schedule and the hook {1} set the learning rate",
        "give the optimizer a number as its learning rate, or leave the hook out",
    ),
    # a custom train_step
    (Feature.TRAIN_STEP, Feature.OTHER_OPTIMIZER): (
        "{0} has its own train_step, which does not use optimizer= of the task",
        "leave optimizer= out of the task, and compile the model with it: model.compile(optimizer=...)",
    ),
    **{
        (Feature.TRAIN_STEP, feature): (f"{what} does not work with the train_step of {{0}}", fix)
        for feature, (what, fix) in OF_TRAIN_STEPS.items()
    },
    (Feature.TRAIN_STEP, Feature.METRICS, Feature.TEST_STEP): (
        "metrics= of the task does not work with the train_step of {0}",
        "return them from test_step, or leave test_step out and give the task loss= and metrics=",
    ),
    (Feature.TRAIN_STEP, Feature.VALIDATION, Feature.NO_EVAL_LOSS): (
        "{0} has its own train_step and the task has validation data, but nothing says how to evaluate",
        "write test_step(self, data), give the task loss=, or leave validation= out",
    ),
    (Feature.KERAS, Feature.LOSS_SCALE): SCALED,
}

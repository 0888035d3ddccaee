"""Combinations that no framework supports: evaluations, schedules, batches, streams, runs without checkpoints."""

from __future__ import annotations

from hpctrain.config.features import Feature, Rows, Trait

ROWS: Rows = {
    # a run without checkpoints
    (Feature.INITIAL_WEIGHTS, Feature.NO_CHECKPOINTS): (
        "checkpoint.init_from is {0}, but checkpoint.enabled is false, so nothing is loaded",
        "leave checkpoint.enabled out; checkpoint.interval: none saves at the end alone",
    ),
    (Feature.META_INIT, Feature.NO_CHECKPOINTS): (
        "the task made {0} on the meta device, but checkpoint.enabled is false, so it never gets values",
        "leave checkpoint.enabled out and set checkpoint.init_from; or make the model with values",
    ),
    (Trait.LOW_PRECISION, Feature.OWN_PRECISION): (
        "{0}, but {1}",
        "give a PyTorch model parameters of 32 bits (model.float()); make a Keras model after "
        "keras.config.set_dtype_policy('mixed_bfloat16'), or 'mixed_float16' for fp16",
    ),
    # a stream, which has no length and one order
    (Feature.STREAM, Trait.COUNTS_EPOCHS): (
        "the training data of task {0} is a stream, which has no epochs, and {1}",
        "count in steps: train.steps, schedule.warmup_steps, or another schedule.kind",
    ),
    (Feature.STREAM, Feature.WORKERS): (
        "the training data of task {0} is a stream, and data.workers is {1}",
        "set data.workers to 0: one thread reads a stream",
    ),
    (Feature.STREAM, Feature.SAMPLER): (
        "the training data of task {0} is a stream, which has one order, and the task has a sampler",
        "leave the sampler out",
    ),
    # evaluations, schedules and batches
    (Trait.NEEDS_VALIDATION, Feature.NO_VALIDATION): (
        "{0}, but task {1} has no validation data",
        "give the task validation data (validation=...), or leave out what needs it",
    ),
    (Trait.NEEDS_EVALUATIONS, Feature.NO_EVALUATIONS): (
        "{0}, but nothing is evaluated before the end of the run",
        "set train.eval_every_epochs or train.eval_every_steps",
    ),
    (Feature.OWN_STEP, Feature.VALIDATION, Feature.NO_EVAL_LOSS): (
        "the task has validation data, but neither loss nor metrics to evaluate on them",
        "give metrics={...} or loss=, each a function(outputs, batch) of what forward returns",
    ),
    (Feature.SEVERAL_MODELS, Feature.VALIDATION, Feature.NO_FORWARD): (
        "the task has validation data and several models, but no forward",
        "say what is evaluated: forward=lambda models, batch: models[...](batch[...])",
    ),
    (Feature.ONE_CYCLE, Feature.WARMUP): (
        "schedule.kind is one_cycle, which includes a climb, but a warm-up is given",
        "remove the warm-up; set schedule.climb_share and start_factor",
    ),
    (Feature.SCHEDULE, Feature.TASK_SCHEDULE): (
        "both the run file's schedule and the task's set the learning rate",
        "remove schedule: from the run file, or schedule= from the task",
    ),
    (Feature.CARRIED, Feature.ACCUMULATE): (
        "{0} is carried from batch to batch, and train.accumulate is {1}: a micro-batch would continue from the "
        "samples of another one",
        "leave train.accumulate at 1",
    ),
}

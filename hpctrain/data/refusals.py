"""What does not go with a stream, which has no length and one order."""

from __future__ import annotations

from hpctrain.config.combinations import Feature, Row, Trait

TRAITS = dict.fromkeys(
    (Feature.EPOCHS, Feature.WARMUP_EPOCHS, Feature.STEP_EPOCHS, Feature.CYCLE_EPOCHS, Feature.EXPONENTIAL),
    (Trait.COUNTS_EPOCHS,),
)
ROWS = (
    Row(
        (Feature.STREAM, Trait.COUNTS_EPOCHS),
        "the training data of task {0} is a stream, which has no epochs, and {1}",
        "count in steps: train.steps, schedule.warmup_steps, or another schedule.kind",
    ),
    Row(
        (Feature.STREAM, Feature.WORKERS),
        "the training data of task {0} is a stream, and data.workers is {1}",
        "set data.workers to 0: one thread reads a stream",
    ),
    Row(
        (Feature.STREAM, Feature.SAMPLER),
        "the training data of task {0} is a stream, which has one order, and the task has a sampler",
        "leave the sampler out",
    ),
)

"""What does not go together in evaluations, schedules and batches, of any framework."""

from __future__ import annotations

from hpctrain.config.combinations import Feature, Row, Trait

WATCHED = (Feature.EARLY_STOP, Feature.BEST, Feature.PLATEAU)
"""Features whose value is the name of a metric."""
TRAITS = {
    Feature.BEST: (Trait.NEEDS_VALIDATION,),
    **dict.fromkeys(
        (Feature.EARLY_STOP, Feature.PLATEAU, Feature.EVALUATION_SCHEDULER),
        (Trait.NEEDS_VALIDATION, Trait.NEEDS_EVALUATIONS),
    ),
}
ROWS = (
    Row(
        (Trait.NEEDS_VALIDATION, Feature.NO_VALIDATION),
        "{0}, but task {1} has no validation data",
        "give the task validation data (validation=...), or leave out what needs it",
    ),
    Row(
        (Trait.NEEDS_EVALUATIONS, Feature.NO_EVALUATIONS),
        "{0}, but nothing is evaluated before the end of the run",
        "set train.eval_every_epochs or train.eval_every_steps",
    ),
    Row(
        (Feature.OWN_STEP, Feature.VALIDATION, Feature.NO_EVAL_LOSS),
        "the task has validation data, but neither loss nor metrics to evaluate on them",
        "give metrics={...} or loss=, each a function(outputs, batch) of what forward returns",
    ),
    Row(
        (Feature.SEVERAL_MODELS, Feature.VALIDATION, Feature.NO_FORWARD),
        "the task has validation data and several models, but no forward",
        "say what is evaluated: forward=lambda models, batch: models[...](batch[...])",
    ),
    Row(
        (Feature.ONE_CYCLE, Feature.WARMUP),
        "schedule.kind is one_cycle, which includes a climb, but a warm-up is given",
        "remove the warm-up; set schedule.climb_share and start_factor",
    ),
    Row(
        (Feature.SCHEDULE, Feature.TASK_SCHEDULE),
        "both the run file's schedule and the task's set the learning rate",
        "remove schedule: from the run file, or schedule= from the task",
    ),
    Row(
        (Feature.CARRIED, Feature.ACCUMULATE),
        "{0} is carried from batch to batch, and train.accumulate is {1}: a micro-batch would continue from the "
        "samples of another one",
        "leave train.accumulate at 1",
    ),
)

"""What does not go with any strategy that divides a model or its optimizers over ranks."""

from __future__ import annotations

from hpctrain.config.combinations import Feature, Row, Trait

ROWS = (
    Row(
        (Trait.MEETS_INSIDE, Feature.KERAS),
        "{0}, and the task is a KerasTask",
        "write the model in PyTorch, or leave the key out: Keras has parallel.shard: optimizer alone",
    ),
    Row(
        (Trait.MEETS_INSIDE, Feature.OWN_STEP),
        "{0}, and the task has its own step, whose passes other ranks could not follow",
        "give the task loss= and optimizer=, without step=, or set parallel.shard: optimizer",
    ),
    Row(
        (Trait.MEETS_INSIDE, Feature.COMPILE),
        "{0}, and train.compile is true: ranks meet inside the model",
        "leave train.compile out",
    ),
    Row(
        (Trait.MEETS_INSIDE, Feature.COMPILED_MODEL),
        "{0}, and {1} is compiled: ranks meet inside the model",
        "leave torch.compile and torch.jit out of the task",
    ),
    Row(
        (Trait.MEETS_INSIDE, Feature.JOINT_LAYERS),
        "{0}, and {1} normalises over the samples of all ranks",
        "leave train.sync_batchnorm out, or normalise by LayerNorm",
    ),
    Row(
        (Trait.DIVIDES_OPTIMIZERS, Feature.OWN_OPTIMIZER_STATE),
        "{0}, and {1} holds other optimizers, or state that is in neither its state nor its param_groups",
        "give the task plain optimizers",
    ),
    Row(
        (Trait.DIVIDES, Feature.STEP_HOOKS),
        "{0}, and {1} has hooks of its step (register_step_pre_hook), which would see the gradients of a part",
        "leave the hooks out: train.clip_norm clips by the whole gradient, train.ema_decay averages weights, and "
        "hooks= of the task are called after updates",
    ),
)

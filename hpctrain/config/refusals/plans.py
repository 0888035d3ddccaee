"""Combinations that do not work with a plan: tensor groups, pipelines and shards."""

from __future__ import annotations

from hpctrain.config.features import Feature, Rows, Trait, refusing

WITH_FULLY_SHARDED = {
    Feature.SEVERAL_MODELS: (
        "the task has several models, none of which calls the others",
        "give the task one model, or set parallel.shard: optimizer",
    ),
    Feature.VERIFY: (
        "reduce.verify_every_steps is {1}: no two ranks have rows in common that could be compared",
        "leave reduce.verify_every_steps out",
    ),
    Feature.MIXED_PARAMETERS: (
        "the model has parameters of {1}, which cannot be exchanged together",
        "give all trained parameters one type, or set parallel.shard: optimizer",
    ),
    Feature.PARAMETER_HOOKS: (
        "{1} has gradient hooks (register_hook), which would never be called",
        "leave the hooks out: train.clip_norm clips gradients, and parameter groups have their own rates; or set "
        "parallel.shard: optimizer",
    ),
    Feature.TORCH_METRICS: (
        "{1} of the task is a torchmetrics metric, which would itself synchronise all ranks as soon as "
        "torch.distributed is open",
        "write it as an hpctrain.Metric or as a function, or set parallel.shard: optimizer",
    ),
}


SAY_ELEMENTWISE = (
    "use an optimizer of torch.optim, such as AdamW; your own says what it needs by an attribute: elementwise = True "
    "if it updates each element by itself, False if each parameter"
)
ROWS: Rows = {
    # tensor
    (Feature.TENSOR, Feature.NO_CUTS): (
        "parallel.tensor is {0}, and the task does not say how its layers are split",
        "return TorchTask(..., tensor={'blocks.*.up': hpctrain.columns, ...}), or set parallel.tensor to 1",
    ),
    # pipeline
    (Feature.PIPELINE, Feature.NO_LAYERS): (
        "parallel.pipeline is {0}, and the task does not say what the layers of its model are",
        "return TorchTask(..., layers=lambda model: [model.embed, *model.blocks, model.head]), or an nn.Sequential",
    ),
    (Feature.PIPELINE, Feature.UNKNOWN_OPTIMIZER): (
        "parallel.pipeline is {0}, and {1} may update a parameter from others, which are on other stages",
        SAY_ELEMENTWISE,
    ),
    (Feature.PIPELINE, Feature.EXTRA_STATE): (
        "parallel.pipeline is {0}, and a {1} of the task has extra state (get_extra_state), which would differ from "
        "stage to stage",
        "keep it in buffers",
    ),
    (Feature.PIPELINE, Feature.PER_RANK): (
        "parallel.pipeline is {0}, and state {1!r} of the task is each rank's own: layers and loss would change it on "
        "different ranks",
        "keep it in buffers of the model, or change it in hooks and without PerRank",
    ),
    (Feature.PIPELINE, Feature.CAPTURED_MODEL): (
        "parallel.pipeline is {0}, and {1} of the task holds the model or a part of it, but each rank has different "
        "layers: a penalty, for instance, would cover only this rank's part",
        "compute it from its arguments only: let the last layer also return what it needs of the others, and give "
        "weight decay to the optimizer",
    ),
    # zero1
    (Trait.REDUCE_SCATTERS, Feature.HOROVOD): (
        "{0}, and Horovod would send all gradients to all ranks",
        "set reduce.kind: auto, or leave it out",
    ),
    (Trait.REDUCE_SCATTERS, Feature.OVERLAP): (
        "{0}, which decides itself when gradients are exchanged",
        "leave reduce.overlap at auto",
    ),
    (Trait.REDUCE_SCATTERS, Trait.COMPRESSES): (
        "{0}, and {1}, but gradients are exchanged as they are",
        "leave reduce.compression out",
    ),
    (Trait.REDUCE_SCATTERS, Feature.SPARSE_ADAM): (
        "{0}, and SparseAdam, which updates {1}, takes only sparse gradients",
        "leave parallel.shard out, or use Adam",
    ),
    (Trait.REDUCE_SCATTERS, Feature.UNKNOWN_OPTIMIZER, Feature.RANKS): (
        "{0}, and {1} may update a parameter from others, so ranks that hold a part of them would train another model",
        SAY_ELEMENTWISE,
    ),
    **refusing(Trait.GATHERS, "{0}", WITH_FULLY_SHARDED),
    (Trait.GATHERS, Feature.WHOLE_TENSORS, Feature.RANKS): (
        "{0}, and {1}",
        "use an optimizer that updates each element by itself, such as AdamW, leave parameters without elements out, "
        "or set parallel.shard: optimizer",
    ),
    # several of them
    (Trait.EXCHANGES_IN_PASSES, Feature.OWN_STEP): (
        "{0}, and the task has its own step, whose passes other ranks could not follow",
        "give the task loss= and optimizer=, without step=, or set parallel.shard: optimizer",
    ),
    (Trait.MEETS_INSIDE, Feature.COMPILED_MODEL): (
        "{0}, and {1} is compiled: ranks communicate inside the model",
        "leave torch.compile and torch.jit out of the task",
    ),
    (Trait.MEETS_INSIDE, Feature.JOINT_LAYERS): (
        "{0}, and {1} normalises over the samples of all ranks",
        "leave train.sync_batchnorm out, or normalise by LayerNorm",
    ),
    (Trait.DIVIDES_OPTIMIZERS, Feature.OWN_OPTIMIZER_STATE): (
        "{0}, and {1} holds other optimizers, or state that is in neither its state nor its param_groups",
        "give the task plain optimizers",
    ),
    (Trait.DIVIDES, Feature.STEP_HOOKS): (
        "{0}, and {1} has hooks of its step (register_step_pre_hook), which would see only a part of the gradients",
        "leave the hooks out: train.clip_norm clips by the whole norm, train.ema_decay averages weights, and "
        "hooks= of the task are called after updates",
    ),
    (Trait.ADDS_DENSE, Feature.SPARSE_ROWS): (
        "{0}, and {1} has sparse gradients",
        "leave sparse=True out, or set parallel.shard: optimizer",
    ),
}

"""Combinations that do not work with a way to sum gradients."""

from __future__ import annotations

from hpctrain.config.features import Feature, Rows, Trait

NO_SYNC = "leave sync out of the run file"
WITH_LOCAL_SYNC = {
    Feature.EMA: (
        "train.ema_decay is {0}, and sync.kind is local, which averages weights itself",
        "leave train.ema_decay out: evaluations use the outer weights",
    ),
    Feature.FP16: (
        "train.precision is fp16, whose loss scale would differ between ranks (sync.kind: local)",
        "set train.precision: bf16",
    ),
    Feature.HALF_PARAMETERS: ("16-bit parameters cannot take the small steps of sync.kind: local", NO_SYNC),
    Feature.JOINT_LAYERS: ("{0} normalises over all ranks, which train independently (sync.kind: local)", NO_SYNC),
    Feature.OWN_STEP: ("the task has its own step, and sync.kind is local", NO_SYNC),
    Feature.TRAIN_STEP: ("{0} has its own train_step, and sync.kind is local", NO_SYNC),
    Feature.VERIFY: (
        "reduce.verify_every_steps is {0}, and sync.kind is local: weights differ",
        "leave reduce.verify_every_steps out",
    ),
}
ROWS: Rows = {
    (Feature.HOROVOD, Feature.BF16_SUMS): (
        "Horovod cannot sum bfloat16",
        "set reduce.compression: fp16, or reduce.kind: mpi",
    ),
    (Trait.DIVIDES, Feature.LOCAL_SYNC): (
        "{0}, and sync.kind is local: with local SGD each rank holds the whole model",
        NO_SYNC,
    ),
    **{(feature, Feature.LOCAL_SYNC): texts for feature, texts in WITH_LOCAL_SYNC.items()},
    (Feature.NO_REDUCER, Feature.RANKS): (
        "reduce.kind is none but there are {1} ranks, which would train independently",
        "set reduce.kind: auto, or start one rank",
    ),
}

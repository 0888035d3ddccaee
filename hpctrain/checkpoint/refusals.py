"""What a run without checkpoints cannot have."""

from __future__ import annotations

from hpctrain.config.combinations import Feature, Row

ROWS = (
    Row(
        (Feature.INITIAL_WEIGHTS, Feature.NO_CHECKPOINTS),
        "checkpoint.init_from is {0}, but checkpoint.enabled is false, so nothing is loaded",
        "leave checkpoint.enabled out; checkpoint.interval: none saves at the end alone",
    ),
    Row(
        (Feature.META_INIT, Feature.NO_CHECKPOINTS),
        "the task made {0} on the meta device, but checkpoint.enabled is false, so it never gets values",
        "leave checkpoint.enabled out and set checkpoint.init_from; or make the model with values",
    ),
)

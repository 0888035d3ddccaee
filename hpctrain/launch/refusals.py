"""Settings of jobs that do not go together."""

from __future__ import annotations

from hpctrain.config.combinations import Feature, Row

ROWS = (
    Row(
        (Feature.STAGED_ENVIRONMENT, Feature.WRAP),
        "launch.stage_environment has no use with launch.slurm.wrap",
        "leave launch.stage_environment out: an image is one file",
    ),
)

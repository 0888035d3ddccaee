"""Keys of how a run is watched: the monitor, trackers, profiles."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from hpctrain.config.section import AboveZero, Natural, Positive, Range, Section, WrongValue


class MonitorConfig(Section, key="monitor"):
    """What is watched during the run."""

    enabled: bool = True
    """Watch for stragglers and hangs."""
    window_steps: Annotated[int, Range(least=4)] = 32
    """Steps per window, whose medians are compared."""
    hang_s: AboveZero | None = None
    """Seconds without a finished step that count as a hang (first step: at least 900); by default 10 times the longest
    pause so far, at least 120."""
    on_hang: Literal["report", "abort"] = "abort"
    """abort: end the attempt, which restarts from the last checkpoint; report: only report."""
    action: Literal["report", "exclude_on_requeue"] = "report"
    """exclude_on_requeue: exclude a host that is confirmed to be slow itself from the next requeue."""
    exclude_hours: AboveZero = 24.0
    """Hours for which a slow host, or one that breaks attempts, stays excluded."""
    host_interval_s: AboveZero = 5.0
    """Seconds between readings of the hosts' counters."""


class ProfileConfig(Section, key="track.profile"):
    """Record what the framework does in some steps: torch.profiler or tf.profiler."""

    first_step: Positive | None = None
    """First step to profile; by default no profile. Traces go to <run folder>/profile."""
    last_step: int | None = None
    """Last step to profile; by default four steps after the first."""
    ranks: tuple[Natural, ...] = (0,)
    """Ranks to profile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last_step is not None and self.last_step < (self.first_step or self.last_step + 1):
            what = f"track.profile.last_step is {self.last_step} and first_step {self.first_step}"
            raise WrongValue("track.profile.last_step", what, "give first_step, and a last_step that is not before it")


class TrackConfig(Section, key="track"):
    """Where progress is reported."""

    every_steps: Positive = 10
    """Steps of one reported interval."""
    tensorboard: bool = False
    """Write TensorBoard scalars to <run folder>/tensorboard."""
    mlflow: str | None = None
    """MLflow tracking URI (a folder or a server)."""
    mlflow_experiment: str = "hpctrain"
    """MLflow experiment of the run."""
    wandb: str | None = None
    """Weights & Biases project of the run; WANDB_MODE=offline keeps it in the run folder."""
    prometheus: str | None = None
    """Text file for a node exporter's textfile collector."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Record what the framework does in some steps."""

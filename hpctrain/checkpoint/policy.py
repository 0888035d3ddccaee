"""Rules for when a checkpoint is due and which ones are kept. Pure functions: time and cost are arguments."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.config.section import Range
from hpctrain.config.sections import CheckpointConfig
from hpctrain.errors import ExitCode
from hpctrain.run.attempts import Attempt

FIRST_S = 60.0
"""Seconds to the first automatic checkpoint, which measures the cost."""
LEAST_S = 10.0
"""Minimum interval between automatic checkpoints."""
RETRY_S = 10.0
"""Seconds from a failed save to the next try; doubled after each further failure, up to LONGEST_RETRY_S."""
LONGEST_RETRY_S = 120.0


@dataclass(frozen=True)
class Cost:
    """Measured cost of a checkpoint."""

    stall_s: float
    """Seconds that training was interrupted."""
    write_s: float
    """Seconds until it was committed."""


@dataclass(frozen=True)
class Policy:
    """Rules for saving; a checkpoint is due if any of them applies."""

    every_steps: int | None = None
    every_epochs: int | None = None
    every_s: float | None = None
    mtbf_s: float | None = None
    """Mean time between failures, for the Young/Daly interval; None for no automatic checkpoints."""
    overhead_budget: float = 0.035
    """Maximum fraction of the time that automatic checkpoints may stall training."""

    def due_at(self, step: int, epoch: int, at_epoch_end: bool) -> bool:
        """Whether a checkpoint is due at this position; the same on every rank."""
        if self.every_steps and step % self.every_steps == 0:
            return True
        return bool(self.every_epochs and at_epoch_end and epoch % self.every_epochs == 0)

    def retry_s(self, failures: int, stall_s: float) -> float:
        """Seconds until the next try after this many consecutive failures, with stalls kept within the budget."""
        return max(min(RETRY_S * 2.0 ** min(failures - 1, 10), LONGEST_RETRY_S), stall_s / self.overhead_budget)

    def interval_s(self, cost: Cost | None) -> float:
        """Seconds between checkpoints by the clock; infinity if only positions count. Rank 0 decides."""
        interval = self.every_s or math.inf
        if self.mtbf_s is None:
            return interval
        automatic = FIRST_S if cost is None else automatic_interval_s(cost, self.mtbf_s, self.overhead_budget)
        return min(interval, automatic)


def automatic_interval_s(cost: Cost, mtbf_s: float, overhead_budget: float) -> float:
    """Daly's interval, but long enough to keep stalls within the budget and the disk idle half of the time."""
    return max(daly_s(cost.stall_s, mtbf_s), cost.stall_s / overhead_budget, 2 * cost.write_s, LEAST_S)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """The interval that minimizes time lost to checkpoints and repeated work.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22 (2006), eq. 37; to first order Young's sqrt(2 * stall * mtbf).
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def policy_of(config: CheckpointConfig, attempts: Sequence[Attempt] = ()) -> Policy:
    """The policy of a run file; ``interval: auto`` applies if no other rule is given. ``attempts`` are those so far."""
    steps = config.tiers.run_dir.every_steps or config.every_steps
    if config.interval == "auto" and not (steps or config.every_epochs or config.every_minutes):
        steps = "auto"
    return Policy(
        every_steps=None if steps == "auto" else steps,
        every_epochs=config.every_epochs,
        every_s=60 * config.every_minutes if config.every_minutes else None,
        mtbf_s=mtbf_s(config, attempts) if steps == "auto" else None,
        overhead_budget=config.overhead_budget,
    )


def policy_of_tier(
    every_steps: int | Literal["auto"] | None, config: CheckpointConfig, attempts: Sequence[Attempt] = ()
) -> Policy | None:
    """The policy of a tier in the run file; None if the tier is not used."""
    if every_steps == "auto":
        return Policy(mtbf_s=mtbf_s(config, attempts), overhead_budget=config.overhead_budget)
    return Policy(every_steps=every_steps) if every_steps else None


def mtbf_s(config: CheckpointConfig, attempts: Sequence[Attempt]) -> float:
    """Estimate the mean time between failures: (expected + observed time) / (failures + 1).

    It starts at the expected value and approaches the observed one as failures add up.
    """
    ended = [it for it in attempts if it.verdict and it.started and it.ended]
    failures = sum(it.verdict is not None and it.verdict.exit_code is ExitCode.FAILURE for it in ended)
    trained_s = sum((it.ended or 0.0) - (it.started or 0.0) for it in ended)
    return (3600 * config.mtbf_hours + trained_s) / (failures + 1)


@dataclass(frozen=True)
class Retention:
    """Rules for which checkpoints to keep; others are removed after a newer one is committed."""

    last: int | None = None
    """Number of newest checkpoints to keep; None keeps all."""
    every_steps: int | None = None
    """The first checkpoint at or after each multiple of this is kept forever."""

    def __post_init__(self) -> None:
        Range(least=1).check("keep_last", self.last)
        Range(least=1).check("keep_every_steps", self.every_steps)

    def removable(self, steps: Collection[int], protected: Collection[int]) -> list[int]:
        """Steps to remove, oldest first.

        Args:
            steps: all committed checkpoints.
            protected: those that must stay: the best one, and the newest known to be sound.
        """
        if self.last is None:
            return []
        ordered = sorted(steps)
        kept = {*ordered[-self.last :], *protected, *self.milestones(ordered)}
        return [step for step in ordered if step not in kept]

    def milestones(self, ordered: Sequence[int]) -> set[int]:
        """The first of the ascending steps at or after each multiple of ``every_steps``."""
        if not self.every_steps:
            return set()
        first: dict[int, int] = {}
        for step in ordered:
            first.setdefault(step // self.every_steps, step)
        return {step for multiple, step in first.items() if multiple or not step}  # for multiple 0, only step 0 itself


KEEP_ALL = Retention()
"""Nothing is ever removed."""

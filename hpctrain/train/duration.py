"""How long a run is and when it evaluates."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.sections import TrainConfig
from hpctrain.errors import UserError
from hpctrain.train.state import TrainState


@dataclass(frozen=True)
class Duration:
    """Length and rhythm of a run, in updates."""

    total_steps: int
    batches_per_epoch: int
    eval_every_steps: int | None = None
    eval_every_epochs: int | None = None

    def is_over(self, state: TrainState) -> bool:
        """Whether all updates are done."""
        return state.step >= self.total_steps

    def evaluates_after(self, state: TrainState) -> bool:
        """Whether an evaluation is due at a state that an update has just reached; always after the last update."""
        if self.is_over(state):
            return True
        if self.eval_every_steps and state.step % self.eval_every_steps == 0:
            return True
        return bool(self.eval_every_epochs and state.batch == 0 and state.epoch % self.eval_every_epochs == 0)


def duration_of(config: TrainConfig, batches_per_epoch: int) -> Duration:
    """The duration of a run over data with this number of global batches an epoch."""
    if config.steps is not None:
        total = config.steps
    else:
        assert config.epochs is not None, "TrainConfig holds exactly one of epochs and steps"
        total = config.epochs * batches_per_epoch
    return Duration(total, batches_per_epoch, config.eval_every_steps, config.eval_every_epochs)


def validation_batch(config: TrainConfig, groups: int) -> int:
    """Samples of a rank's batch of validation data; by default the size of one of its micro-batches."""
    if config.eval_batch_per_rank is not None:
        return config.eval_batch_per_rank
    return -(-global_batch(config, groups) // (groups * config.accumulate))


def global_batch(config: TrainConfig, groups: int, each: int = 1) -> int:
    """Samples of one update over all ranks.

    Args:
        config: of the run.
        groups: of ranks that see the same samples; one per rank, unless models are partitioned.
        each: ranks of such a group.

    Raises:
        UserError: there are fewer samples than groups.
    """
    if config.batch_per_rank is not None:
        return config.batch_per_rank * groups
    assert config.global_batch is not None, "TrainConfig holds exactly one of global_batch and batch_per_rank"
    batch = config.global_batch
    if batch < groups:
        found = f"{groups} ranks" if each == 1 else f"{groups} groups of {each} ranks, each with separate samples"
        raise UserError(
            f"train.global_batch is {batch} but there are {found}: some would never see a sample",
            f"set train.global_batch to {groups} or more, or start at most {batch * each} ranks",
        )
    return batch

"""Compares the weights of all ranks now and then: if they drifted apart, the ranks no longer train one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import NoRequeue
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, StopReason

if TYPE_CHECKING:
    from hpctrain.train.training import Training


class VerifyWeights(BaseHook):
    """Fails the run, on every rank, at the first step at which a rank's weights differ from rank 0's in any bit."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        step, group = training.state.step, training.world.data
        if step % self.every_steps == 0:
            hashes = group.allgather(training.framework.weights_hash(), "compare the weights")
            odd = [rank for rank, digest in enumerate(hashes) if digest != hashes[0]]
            if odd:
                raise NoRequeue(
                    f"after step {step} the weights of rank {', '.join(map(str, odd))} differ from those of rank 0",
                    "look for code in the task that changes weights by itself or depends on the rank; else suspect the "
                    "hardware or MPI of these ranks",
                )
        return None

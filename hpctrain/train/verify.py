"""Compares the weights of all ranks now and then: if they drifted apart, the ranks no longer train one model."""

from __future__ import annotations

from hpctrain.errors import NoRequeue
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, StopReason, Training


class VerifyWeights(BaseHook):
    """Fails the run, on every rank, at the first step at which a rank's weights differ in any bit from those that they
    should be equal to: those of the first rank of its stage or, what is cut, of the stage's first tensor group.

    Args:
        every_steps: in between.
        has_tables: tables are partitioned over data-parallel ranks, and not compared.
    """

    def __init__(self, every_steps: int, has_tables: bool = False) -> None:
        self.every_steps, self.has_tables = every_steps, has_tables

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        step, world, framework = training.state.step, training.world, training.framework
        if step % self.every_steps == 0:
            shared = framework.weights_hash(shared_only=True) if world.tensor.size > 1 else ""
            own = framework.weights_hash(shared_only=self.has_tables)
            hashes = world.everyone.allgather([own, shared], "compare the weights")
            tensor, stage = world.tensor.size, len(hashes) // world.pipeline.size
            first = [rank - rank % stage for rank in range(len(hashes))]  # of the same stage
            wanted = [[hashes[one + rank % tensor][0], hashes[one][1]] for rank, one in enumerate(first)]
            odd = [rank for rank, found in enumerate(hashes) if found != wanted[rank]]
            if odd:
                raise NoRequeue(
                    f"after step {step} the weights of rank {', '.join(map(str, odd))} differ from those of "
                    f"rank {first[odd[0]]}",
                    "look for code in the task that changes weights by itself or depends on the rank; else suspect the "
                    "hardware or MPI of these ranks",
                )
        return None

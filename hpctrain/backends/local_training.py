"""``sync: {kind: local}``: groups of ranks that train apart, and meet for an outer step every N updates.

A framework whose data-parallel group is this rank's own, or its node's, makes the updates; see reduce.outer_step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.backends.update import UpdateResult
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import SyncConfig
from hpctrain.errors import Code, NoRequeue
from hpctrain.reduce.outer_step import OuterStep, Pace
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.train.framework import (
    Facts,
    Framework,
    FrameworkOfParts,
    HostBatch,
    HostMemory,
    NonFiniteLoss,
    StepResult,
    Sums,
    samples_of,
)
from hpctrain.train.metrics import Meter
from hpctrain.train.schedule import Factors
from hpctrain.train.state import ArrayTensor, Placement, StateTensor, TrainState

OUTER, VELOCITY, AHEAD, COMING, PACE = (f"sync/{name}" for name in ("outer", "velocity", "ahead", "coming", "pace"))
NOTHING = UpdateResult((0.0, 0.0), None)
"""Of an update that this rank does not make."""


class Apart(Framework, Protocol):
    """A framework whose trained weights can be exchanged from outside."""

    def weights(self) -> NDArray[Any]:
        """A copy of all trained weights in one row, float32 or float64."""

    def set_weights(self, flat: NDArray[Any]) -> None:
        """Takes over what ``weights`` gave."""

    def use(self, choice: ReducerChoice) -> None:
        """Sums gradients from now on as this choice says, whose reducer is known. Collective."""


def of_rank(tensor: Any) -> StateTensor:
    """A StateTensor that ranks have in common as long as they do not train apart, as it is while they do."""
    own: StateTensor = replace(tensor, placement=Placement.RANK, tiling=None)
    return own


def inner_world(world: World, config: SyncConfig) -> World:
    """The world of the ranks that exchange gradients all the time. Collective."""
    inner = world.data.split("data of the node", world.node) if config.within == "node" else Group("data")
    return replace(world, data=inner)


class LocalFramework(FrameworkOfParts):
    """See train.framework.Framework.

    Args:
        framework: opened in ``inner_world``, with equal weights on all ranks.
        world: of all ranks.
        inner: see ``inner_world``.
        config: the run file's section.
        apart: how gradients are summed once the ranks train apart.
    """

    def __init__(self, framework: Apart, world: World, inner: World, config: SyncConfig, apart: ReducerChoice) -> None:
        self.framework = self.evaluator = self.source = framework
        self.world, self.group, self.config, self.apart = world, inner.data, config, apart
        weights = framework.weights()
        world.everyone.broadcast_array(weights, "receive the model")
        framework.set_weights(weights)
        self.meeting = world.data.split("outer steps", 0)
        self.outer = OuterStep(self.meeting, weights, config.outer_lr, config.outer_momentum, config.overlap)
        index = world.node if config.within == "node" else world.rank
        self.pace = Pace(self.meeting, index, config.every_steps) if config.by_speed else None
        self.progress, self.total_steps = TrainState(), 0
        self.aside: NDArray[Any] | None = None
        """This rank's weights while the model has the outer ones."""
        self.is_apart = False
        self.has_outer = False
        """Whether there are outer weights that may differ from this rank's."""

    def follow(self, progress: TrainState, total_steps: int) -> None:
        """Counts updates from now on by the run's state, up to its last one, which ends a round."""
        self.progress, self.total_steps = progress, total_steps

    @property
    def facts(self) -> Facts:
        return self.framework.facts

    @property
    def host(self) -> HostMemory:
        return self.framework.host

    def set_learning_rate(self, factors: Factors) -> None:
        self.framework.set_learning_rate(factors)

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        self._own_weights()
        step, begin = self.progress.step + 1, self.config.after_steps
        if step <= begin:
            result = self._update(micro_batches, global_samples)
            if step == begin:
                self.outer.begin(self.framework.weights())
            return result
        self.has_outer = True
        if not self.is_apart:
            self.framework.use(self.apart)
            self.is_apart = True
        position = (step - begin - 1) % self.config.every_steps + 1
        result = self._own_update(micro_batches) if self.pace is None or self.pace.is_due(position) else NOTHING
        self.outer.arrived(False)
        is_last = step >= self.total_steps
        if position == self.config.every_steps or is_last:
            self.framework.set_weights(self.outer.end_round(self.framework.weights(), is_last))
            if self.pace is not None:
                self.pace.end_round()
        return result

    def dry_call(self, batch: HostBatch, validation: Sequence[HostBatch] = ()) -> None:
        self.framework.dry_call(batch, validation)

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        self._outer_weights()
        return self.framework.evaluate(batch, meters)

    def predict(self, batch: HostBatch) -> dict[str, NDArray[Any]]:
        self._outer_weights()
        return self.framework.predict(batch)

    def state(self) -> list[StateTensor]:
        """While ranks train apart, each has its own weights and optimizer state."""
        self._own_weights()
        found = list(self.framework.state())
        if not self.has_outer:
            return found
        self.outer.settle()
        outer = self.outer
        shared = {OUTER: outer.outer, VELOCITY: outer.velocity, COMING: outer.coming}
        shared |= {PACE: self.pace.updates} if self.pace is not None else {}
        return [
            *(one if one.placement is Placement.RANK else of_rank(one) for one in found),
            *(ArrayTensor(name, array) for name, array in shared.items() if len(array)),
            *([ArrayTensor(AHEAD, outer.ahead, Placement.RANK)] if len(outer.ahead) else []),
        ]

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """At another number of ranks each takes the mean of what ranks had."""
        self.aside = None
        self.framework.load(arrays)
        self.has_outer = OUTER in arrays
        outer = self.outer
        outer.settle()
        outer.begin(arrays[OUTER] if OUTER in arrays else self.framework.weights())
        for name, array in ((VELOCITY, outer.velocity), (AHEAD, outer.ahead), (COMING, outer.coming)):
            if name in arrays and len(array):
                array[:] = arrays[name]
        if self.pace is not None and PACE in arrays:
            self.pace.load(arrays[PACE])

    def weights_hash(self, shared_only: bool = False) -> str:
        self._own_weights()
        return self.framework.weights_hash(shared_only)

    def close(self) -> None:
        self.framework.close()
        self.meeting.free()

    def _own_update(self, micro_batches: Sequence[HostBatch]) -> StepResult:
        """Without the ranks that train apart from this one."""
        samples = np.array([sum(map(samples_of, micro_batches))])
        self.group.add(samples, "count the samples of the group")
        begin = time.perf_counter()
        result = self._update(micro_batches, int(samples[0])) if samples[0] else NOTHING
        if self.pace is not None:
            self.pace.seconds.append(time.perf_counter() - begin)
        return result

    def _update(self, micro_batches: Sequence[HostBatch], samples: int) -> StepResult:
        try:
            return self.framework.step(micro_batches, samples)
        except NonFiniteLoss as error:  # the others may be far from here
            raise NoRequeue(
                f"{error.what} of rank {self.world.rank} is not finite at step {self.progress.step + 1}",
                "lower the learning rate, lengthen the warm-up, or set train.clip_norm",
                Code.NAN,
            ) from error

    def _outer_weights(self) -> None:
        if self.aside is None and self.has_outer:
            self.aside = self.framework.weights()
            self.framework.set_weights(self.outer.outer)

    def _own_weights(self) -> None:
        if self.aside is not None:
            self.framework.set_weights(self.aside)
            self.aside = None

"""``sync: {kind: local}``: groups of ranks train separately and exchange progress in outer steps (reduce.outer_step).

The updates are made by a framework whose data-parallel group is this rank alone, or the ranks of its node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from hpctrain.backends.update import UpdateResult
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import SyncConfig
from hpctrain.errors import Code, NoRequeue
from hpctrain.reduce.outer_step import Flat, FlatSums, OuterStep, is_due
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.system.array_types import Array
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
from hpctrain.train.state import ArrayTensor, Placement, StateTensor, TrainState
from hpctrain.train.stateful import make_equal, value_of

OUTER, VELOCITY, AHEAD, COMING, UNDER_WAY = (
    f"sync/{name}" for name in ("outer", "velocity", "ahead", "coming", "under_way")
)
PARTS = 16
"""Number of parts of the weights that are exchanged in turn with ``overlap``."""
ALL = slice(0, sys.maxsize)
NOTHING = UpdateResult({})
"""Result of an update for which the group has no samples."""


class FlatWeights(FlatSums, Protocol):
    """All trained weights of a model as one flat array, and sums of such arrays over ranks that make outer steps."""

    @property
    def state_tensor(self) -> Callable[[str, Flat, Placement], StateTensor]:
        """Names a flat array as state."""

    def weights(self, at: slice = ALL) -> Flat:
        """A copy of all weights, or a slice of them."""

    def set_weights(self, flat: Flat, at: slice = ALL) -> None:
        """Sets what ``weights`` returned."""

    def close(self) -> None:
        """Ends sums."""


class Apart(Framework, Protocol):
    """A framework whose trained weights can be read and set from outside."""

    def flat_weights(self, group: Group, by_device: Group | None) -> FlatWeights:
        """Makes the trained weights of all ranks equal, and opens them. Collective.

        Args:
            group: the ranks, on a communicator that nothing else uses.
            by_device: the ranks, to sum from device to device by a process group; None: through host memory.
        """

    def use(self, choice: ReducerChoice) -> None:
        """Switches to the reducer of this choice, which needs no measuring. Collective."""

    @property
    def keras_model(self) -> Any:
        """See checkpoint.initial.OfKeras."""

    def begin_averages(self) -> None:
        """See checkpoint.initial.OfKeras."""


def covered(sizes: Sequence[int], at: slice) -> list[tuple[int, slice, slice]]:
    """What a slice of concatenated arrays of these sizes covers: (index, slice of the array, place in the slice)."""
    found, begin = [], -at.start
    for index, size in enumerate(sizes):
        first, end = max(begin, 0), min(begin + size, at.stop - at.start)
        if first < end:
            found.append((index, slice(first - begin, end - begin), slice(first, end)))
        begin += size
    return found


def of_rank(tensor: StateTensor) -> StateTensor:
    """A StateTensor that is normally replicated, as rank-local state during local training."""
    return replace(tensor, placement=Placement.RANK, tiling=None)


def inner_world(world: World, config: SyncConfig) -> World:
    """The world whose data group is the ranks that exchange gradients in every update. Collective."""
    inner = world.data.split("data of the node", world.node) if config.within == "node" else Group("data")
    return replace(world, data=inner)


class HostFlatWeights:
    """Flat weights in host memory, as NumPy's arrays; see FlatWeights.

    Args:
        group: the ranks, on a communicator that nothing else uses.
        weights, set_weights: of the model; see FlatWeights.
    """

    state_tensor = ArrayTensor

    def __init__(self, group: Group, weights: Callable[..., Array], set_weights: Callable[..., None]) -> None:
        self.group = group
        self.size = group.size
        self.weights = weights
        self.set_weights = set_weights
        self.begin_add = group.begin_add
        values = weights()
        group.broadcast_array(values, "receive the model")
        set_weights(values)
        self.dtype = values.dtype

    def array(self, values: Array) -> Array:
        return np.array(values, self.dtype)

    def close(self) -> None:
        """Nothing is open besides the group."""


class LocalFramework(FrameworkOfParts):
    """Local training around a framework; see train.framework.Framework.

    Args:
        framework: opened in ``inner_world``.
        world: all ranks.
        inner: the result of ``inner_world``.
        config: the run file's sync section.
        apart: how gradients are summed once ranks train separately; with process groups, weights are as well.
    """

    def __init__(self, framework: Apart, world: World, inner: World, config: SyncConfig, apart: ReducerChoice) -> None:
        self.framework = self.evaluator = self.source = framework
        self.dry_call = framework.dry_call
        self.set_learning_rate = framework.set_learning_rate
        self.world = world
        self.group = inner.data
        self.config = config
        self.apart = apart
        self.meeting = world.data.split("outer steps", 0)
        self.flat = framework.flat_weights(self.meeting, world.data if apart.config.kind == "nccl" else None)
        self.parts = min(PARTS, config.every_steps) if config.overlap else 0
        self.outer = OuterStep(self.flat, self.flat.weights(), config.outer_lr, config.outer_momentum, self.parts)
        self.progress, self.total_steps = TrainState(), 0
        self.aside: Flat | None = None
        """This rank's weights while the model has the outer weights."""
        self.is_apart = False
        self.has_outer = False
        """Whether outer weights exist that may differ from this rank's."""
        self.is_loaded = False
        """Whether ranks that exchange gradients may have loaded different state."""

    def follow(self, progress: TrainState, total_steps: int) -> None:
        """Counts updates by this state from now on; a round ends at the run's last update."""
        self.progress, self.total_steps = progress, total_steps

    @property
    def facts(self) -> Facts:
        return self.framework.facts

    @property
    def host(self) -> HostMemory:
        return self.framework.host

    @property
    def keras_model(self) -> Any:
        return self.framework.keras_model

    def begin_averages(self) -> None:
        self.framework.begin_averages()
        self.outer.settle()
        self.outer.begin(self.flat.weights())

    def step(self, micro_batches: Sequence[HostBatch], global_samples: int) -> StepResult:
        self._own_weights()
        if self.is_loaded:
            self._agree()
        step, begin = self.progress.step + 1, self.config.after_steps
        if step <= begin:
            result = self._update(micro_batches, global_samples)
            if step == begin:
                self.outer.begin(self.flat.weights())
            return result
        self.has_outer = True
        if not self.is_apart:
            self.framework.use(self.apart)
            self.is_apart = True
        position = (step - begin - 1) % self.config.every_steps + 1
        result = self._own_update(micro_batches)
        self.outer.arrived(False)
        ends = position == self.config.every_steps
        is_last = step >= self.total_steps
        if self.parts and (is_last or is_due(position, self.parts, self.config.every_steps)):
            self._land()
            if not is_last:
                self.outer.leave(self.flat.weights(self.outer.next_part))
        if is_last or (ends and not self.parts):
            self.flat.set_weights(self.outer.end_round(self.flat.weights()))
        return result

    def evaluate(self, batch: HostBatch, meters: Iterable[Meter] = ()) -> Sums:
        self._outer_weights()
        return self.framework.evaluate(batch, meters)

    def predict(self, batch: HostBatch) -> dict[str, Array]:
        self._outer_weights()
        return self.framework.predict(batch)

    def state(self) -> list[StateTensor]:
        """The state; once ranks train separately, weights and optimizer state are rank-local."""
        self._own_weights()
        found = list(self.framework.state())
        if not self.has_outer:
            return found
        self.outer.settle()
        outer, named = self.outer, self.flat.state_tensor
        kept = [
            named(OUTER, outer.outer, Placement.REPLICATED),
            named(VELOCITY, outer.velocity, Placement.REPLICATED),
            named(COMING, outer.coming, Placement.REPLICATED),
            ArrayTensor(UNDER_WAY, outer.under_way),
            named(AHEAD, outer.ahead, Placement.RANK),
        ]
        own = (one if one.placement is Placement.RANK else of_rank(one) for one in found)
        return [*own, *(one for one in kept if one.shape[0])]

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Loads saved state; on a different number of ranks, each rank gets the mean over the saved ranks."""
        self.aside, self.is_loaded = None, True
        self.framework.load(arrays)
        self.has_outer = OUTER in arrays
        outer, copied = self.outer, self.flat.array
        outer.settle()
        outer.begin(copied(arrays[OUTER]) if OUTER in arrays else self.flat.weights())
        if VELOCITY in arrays and len(outer.velocity):
            outer.velocity[:] = copied(arrays[VELOCITY])
        if COMING in arrays and arrays[COMING].shape == outer.coming.shape:  # parts of other sizes cannot continue
            outer.ahead[:], outer.coming[:] = copied(arrays[AHEAD]), copied(arrays[COMING])
            outer.under_way[:] = arrays[UNDER_WAY]

    def weights_hash(self, shared_only: bool = False) -> str:
        self._own_weights()
        return self.framework.weights_hash(shared_only)

    def close(self) -> None:
        self.flat.close()
        self.framework.close()
        self.meeting.free()

    def _agree(self) -> None:
        """Makes ranks equal that exchange gradients now but trained on other nodes before a resume. Collective."""
        self.is_loaded = False
        if len(set(self.group.allgather(self.framework.weights_hash(True), "compare the weights of a node"))) > 1:
            make_equal(self.framework, self.group)
            self.outer.settle()
            ahead = value_of(self.flat.state_tensor(AHEAD, self.outer.ahead, Placement.RANK))
            self.group.add(ahead, "average the progress of a node")
            self.outer.ahead[:] = self.flat.array(ahead / self.group.size)

    def _own_update(self, micro_batches: Sequence[HostBatch]) -> StepResult:
        """An update within the group of ranks that exchange gradients."""
        samples = np.array([sum(map(samples_of, micro_batches))])
        self.group.add(samples, "count the samples of the group")
        return self._update(micro_batches, int(samples[0])) if samples[0] else NOTHING

    def _update(self, micro_batches: Sequence[HostBatch], samples: int) -> StepResult:
        try:
            return self.framework.step(micro_batches, samples)
        except NonFiniteLoss as error:  # no collective: other groups may be far from this point
            raise NoRequeue(
                f"{error.what} of rank {self.world.rank} is not finite at step {self.progress.step + 1}",
                "lower the learning rate, lengthen the warm-up, or set train.clip_norm",
                Code.NAN,
            ) from error

    def _land(self) -> None:
        at = self.outer.part
        if at.start < at.stop:
            self.flat.set_weights(self.outer.land(self.flat.weights(at)), at)

    def _outer_weights(self) -> None:
        if self.aside is None and self.has_outer:
            self.aside = self.flat.weights()
            self.flat.set_weights(self.outer.outer)

    def _own_weights(self) -> None:
        if self.aside is not None:
            self.flat.set_weights(self.aside)
            self.aside = None

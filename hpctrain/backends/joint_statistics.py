"""Statistics over the samples of all ranks, exchanged by BatchNorm layers in forward and backward passes.

Only ranks that have samples in a micro-batch take part, so a rank whose part is empty needs no forward pass. Count,
mean and sum of squared deviations are merged by the formula of Chan, Golub and LeVeque (1979), in float64 and in rank
order, so results are bitwise equal on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.system.array_types import Floats, Reals
from hpctrain.train.clock import Phase, StepClock

SAME_ORDER = "call the same BatchNorm layers in the same order on all ranks, or set train.sync_batchnorm: false"
HEADER = 3
"""Numbers at the start of a message: index of the meeting in the micro-batch, its kind, and the number of values."""
MERGE, ADD = 0.0, 1.0
KINDS = {MERGE: "forward", ADD: "backward"}


@dataclass(frozen=True)
class Merged:
    """Statistics of all samples, per channel."""

    count: float
    """Number of values per channel."""
    mean: Floats
    squares: Floats
    """Sums of squared deviations from the mean."""


def merged(counts: Floats, means: Floats, squares: Floats) -> Merged:
    """Merges the statistics of parts into those of the whole; pure.

    Args:
        counts: number of values per channel in each part; of shape [parts].
        means: mean of each part; of shape [parts, channels].
        squares: sums of squared deviations from the part's mean; of shape [parts, channels].
    """
    count = float(counts.sum())
    weights = counts[:, None]
    mean = (weights * means).sum(0) / max(count, 1.0)
    return Merged(count, mean, squares.sum(0) + (weights * (means - mean) ** 2).sum(0))


class BatchNorms:
    """A model's BatchNorm layers in training. In this base class, each rank normalises over its own samples."""

    names = frozenset[str]()
    """Names of buffers that are equal on all ranks."""

    def update(self, micro_batches: int) -> contextlib.AbstractContextManager[None]:
        """A context for the forward and backward passes of one update. Collective.

        Args:
            micro_batches: number of this rank's micro-batches.
        """
        return contextlib.nullcontext()

    def begin_micro_batch(self, index: int, agree: Callable[[], None] | None = None) -> None:
        """See JointStatistics."""

    def trial(self) -> contextlib.AbstractContextManager[object]:
        """A context for passes of this rank alone."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """Makes running statistics those of rank 0, for example after loading. Collective."""

    def close(self) -> None:
        """Releases communicators."""


class JointStatistics(BatchNorms):
    """Exchanges statistics in a model's BatchNorm layers, which then normalise over the samples of all ranks.

    In each micro-batch, the ranks that have it meet in every layer, and must reach the same layers in the same order.

    All methods and the constructor are collective.

    Args:
        group: the ranks that see different samples.
        clock: counts waiting as exchange time, since a waiting rank is not slow.
    """

    def __init__(self, group: Group, clock: StepClock) -> None:
        everyone = group.part("statistics", True)
        assert everyone is not None, "all ranks take part"
        self.everyone, self.clock = everyone, clock
        self.counts = np.zeros(group.size, np.int64)
        """Number of micro-batches of each rank in this update."""
        self.parts: dict[bytes, Group | None] = {}
        """Groups by their member ranks; created when first needed."""
        self.group = everyone
        """The ranks that meet in the current micro-batch."""
        self.meetings = 0
        self.agree: Callable[[], None] | None = None

    def passes(self) -> contextlib.AbstractContextManager[object]:
        """A context around the passes of an update."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def update(self, micro_batches: int) -> Iterator[None]:
        """See BatchNorms. Running statistics of ranks that had fewer micro-batches are then copied from rank 0."""
        self.begin_update(micro_batches)
        with self.passes():
            yield
        if self.passed_over:  # rank 0 has had all micro-batches, see data.order.part_of
            self.follow()

    def begin_update(self, micro_batches: int) -> None:
        """Exchanges the number of micro-batches of each rank. Collective over all ranks."""
        own = np.array([micro_batches], np.int64)
        self.counts = self.everyone.gather(own, "begin an update with joint statistics").reshape(-1)
        for index in range(int(self.counts.max())):
            takes_part = self.counts > index
            if takes_part.tobytes() not in self.parts:
                mine = bool(takes_part[self.everyone.rank])
                part = self.everyone if takes_part.all() else self.everyone.part("statistics", mine)
                self.parts[takes_part.tobytes()] = part

    def begin_micro_batch(self, index: int, agree: Callable[[], None] | None = None) -> None:
        """Begins a micro-batch: from now on, the ranks that have it, including this one, meet.

        Args:
            index: index of the micro-batch, from 0.
            agree: called before each meeting; raises if other ranks are in another collective.
        """
        part = self.parts[(self.counts > index).tobytes()]
        assert part is not None, "this rank has said that it has it"
        self.group, self.meetings, self.agree = part, 0, agree

    @property
    def passed_over(self) -> bool:
        """Whether some rank had fewer micro-batches than another, so that its running statistics lag behind."""
        return bool((self.counts < self.counts.max(initial=0)).any())

    def merge(self, count: float, mean: Reals, squares: Reals) -> Merged:
        """Merges this rank's statistics with those of the other ranks.

        Args:
            count: number of values per channel on this rank.
            mean: of shape [channels].
            squares: sums of squared deviations from that mean; of shape [channels].

        Raises:
            UserError: other ranks are in a different layer.
            RunFailed: other ranks did not arrive in time.
        """
        rows = self._meet(MERGE, np.concatenate([[count], mean, squares]))
        channels = len(mean)
        return merged(rows[:, 0], rows[:, 1 : 1 + channels], rows[:, 1 + channels :])

    def add(self, values: Reals) -> Floats:
        """The elementwise sum over the ranks; of shape [numbers]. Raises the errors of ``merge``."""
        total: Floats = self._meet(ADD, values).sum(0)
        return total

    def close(self) -> None:
        """Releases communicators."""
        for part in {id(part): part for part in (*self.parts.values(), self.everyone) if part is not None}.values():
            part.free()
        self.parts.clear()

    def _meet(self, kind: float, values: Reals) -> Floats:
        """Gathers the values of all ranks that take part, one row per rank."""
        self.clock.mark(Phase.BACKWARD)  # its end is the rank's arrival
        if self.agree is not None:
            self.agree()
        rows = self._gather(np.concatenate([[self.meetings, kind, len(values)], values]).astype(np.float64))
        self.clock.mark(Phase.EXCHANGE)
        self.meetings += 1
        return rows[:, HEADER:]

    def _gather(self, message: Floats) -> Floats:
        """Gathers messages; raises UserError if their headers differ."""
        try:
            rows = self.group.gather(message, f"exchange BatchNorm statistics ({KINDS[message[1]]} pass)")
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "mpi4py":
                raise
            raise UserError(f"ranks are in different BatchNorm layers: {error}", SAME_ORDER) from error
        other = np.flatnonzero((rows[:, :HEADER] != message[:HEADER]).any(1))
        if len(other):
            raise UserError(f"ranks are in different BatchNorm layers of the {KINDS[message[1]]} pass", SAME_ORDER)
        return rows

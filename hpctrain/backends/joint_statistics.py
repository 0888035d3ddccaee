"""Statistics over the samples of all ranks: what BatchNorm layers exchange in forward and backward passes.

Only the ranks that have samples in a micro-batch meet there, so that one whose part is empty needs no forward pass.
Count, mean and sum of squared deviations are merged by the formula of Chan, Golub and LeVeque (1979), in float64 and in
the order of the ranks: every rank gets the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError, UserError
from hpctrain.train.clock import Phase, StepClock

Floats = NDArray[np.float64]
SAME_ORDER = "call the same BatchNorm layers in the same order on all ranks, or set train.sync_batchnorm: false"
HEADER = 3
"""Numbers before the values of a message: which meeting of the micro-batch it is, of which kind, of what length."""
MERGE, ADD = 0.0, 1.0
KINDS = {MERGE: "forward", ADD: "backward"}


@dataclass(frozen=True)
class Merged:
    """Statistics of all samples, of each channel."""

    count: float
    """Values that each channel has."""
    mean: Floats
    squares: Floats
    """Sums of squared deviations from the mean."""


def merged(counts: Floats, means: Floats, squares: Floats) -> Merged:
    """The statistics of parts as those of the whole; pure.

    Args:
        counts: values that each part has; of shape [parts].
        means: of shape [parts, channels].
        squares: sums of squared deviations from the part's mean; of shape [parts, channels].
    """
    count = float(counts.sum())
    weights = counts[:, None]
    mean = (weights * means).sum(0) / max(count, 1.0)
    return Merged(count, mean, squares.sum(0) + (weights * (means - mean) ** 2).sum(0))


class BatchNorms:
    """BatchNorm layers of a model while it trains: each rank normalises over its own samples."""

    names = frozenset[str]()
    """Of buffers that are equal on all ranks."""
    problem: HpctrainError | None = None
    """What ended a pass where ranks met, for callers whose framework wraps errors."""

    def update(self, micro_batches: int) -> contextlib.AbstractContextManager[None]:
        """Forward and backward passes of one update. Collective.

        Args:
            micro_batches: that this rank has.
        """
        return contextlib.nullcontext()

    def begin_micro_batch(self, index: int, agree: Callable[[], None] | None = None) -> None:
        """See JointStatistics."""

    def trial(self) -> contextlib.AbstractContextManager[object]:
        """Passes of this rank alone."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """Statistics were loaded. Collective."""

    def close(self) -> None:
        """Releases communicators."""


class JointStatistics(BatchNorms):
    """Meetings of the ranks in the BatchNorm layers of a model, which normalise over the samples of all.

    Layers of the micro-batches of the same index meet; all ranks must come to the same ones in the same order.

    Collective, as are all its methods.

    Args:
        group: the ranks that see different samples.
        clock: gets the time of waiting as that of an exchange, since whoever waits is not slow.
    """

    def __init__(self, group: Group, clock: StepClock) -> None:
        everyone = group.part("statistics", True)
        assert everyone is not None, "all ranks take part"
        self.everyone, self.clock = everyone, clock
        self.counts = np.zeros(group.size, np.int64)
        """Micro-batches of each rank in this update."""
        self.parts: dict[bytes, Group | None] = {}
        """Groups by the ranks in them; made when they are first needed."""
        self.group = everyone
        """Those that meet in the micro-batch under way."""
        self.meetings = 0
        self.agree: Callable[[], None] | None = None

    def passes(self) -> contextlib.AbstractContextManager[object]:
        """Around those of an update."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def update(self, micro_batches: int) -> Iterator[None]:
        """See BatchNorms. Running statistics of a rank that had fewer micro-batches than others follow theirs."""
        self.begin_update(micro_batches)
        with self.passes():
            yield
        if self.passed_over:  # rank 0 has had all of them, see part_of
            self.follow()

    def begin_update(self, micro_batches: int) -> None:
        """Learns how many micro-batches each rank has. Collective over all ranks."""
        own = np.array([micro_batches], np.int64)
        self.counts = self.everyone.gather(own, "begin an update with joint statistics").reshape(-1)
        for index in range(int(self.counts.max())):
            takes_part = self.counts > index
            if takes_part.tobytes() not in self.parts:
                mine = bool(takes_part[self.everyone.rank])
                part = self.everyone if takes_part.all() else self.everyone.part("statistics", mine)
                self.parts[takes_part.tobytes()] = part

    def begin_micro_batch(self, index: int, agree: Callable[[], None] | None = None) -> None:
        """The ranks that have the micro-batch of this index, this one among them, meet from now on.

        Args:
            index: from 0.
            agree: called before each meeting; raises if other ranks do something else together.
        """
        part = self.parts[(self.counts > index).tobytes()]
        assert part is not None, "this rank has said that it has it"
        self.group, self.meetings, self.agree = part, 0, agree

    @property
    def passed_over(self) -> bool:
        """Whether some rank has had fewer micro-batches than another, and so lacks what the layers have learnt."""
        return bool((self.counts < self.counts.max(initial=0)).any())

    def merge(self, count: float, mean: NDArray[np.floating], squares: NDArray[np.floating]) -> Merged:
        """Statistics of the samples of all ranks, from those of this one's.

        Args:
            count: values that each channel has on this rank.
            mean: of shape [channels].
            squares: sums of squared deviations from that mean; of shape [channels].

        Raises:
            UserError: other ranks are in another layer.
            RunFailed: they did not come in time.
        """
        rows = self._meet(MERGE, np.concatenate([[count], mean, squares]))
        channels = len(mean)
        return merged(rows[:, 0], rows[:, 1 : 1 + channels], rows[:, 1 + channels :])

    def add(self, values: NDArray[np.floating]) -> Floats:
        """The sum over the ranks; of shape [numbers]. Errors as of ``merge``."""
        total: Floats = self._meet(ADD, values).sum(0)
        return total

    def close(self) -> None:
        """Releases communicators."""
        for part in {id(part): part for part in (*self.parts.values(), self.everyone) if part is not None}.values():
            part.free()
        self.parts.clear()

    def _meet(self, kind: float, values: NDArray[np.floating]) -> Floats:
        """The rows of all ranks that take part."""
        try:
            self.clock.mark(Phase.BACKWARD)  # whose end is a rank's arrival
            if self.agree is not None:
                self.agree()
            rows = self._gather(np.concatenate([[self.meetings, kind, len(values)], values]).astype(np.float64))
            self.clock.mark(Phase.EXCHANGE)
            self.meetings += 1
            return rows[:, HEADER:]
        except HpctrainError as error:
            self.problem = error
            raise

    def _gather(self, message: Floats) -> Floats:
        """Messages of equal headers, or UserError."""
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

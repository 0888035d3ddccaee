"""Sums of which the first are used while the last are under way: between nodes of CPUs, the optimizer then updates some
parameters while the network still sends the gradients of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hpctrain.backends.torch.reduce.allreduce import TensorAllreduce
from hpctrain.backends.torch.reduce.gradients import FlatGradients
from hpctrain.backends.torch.reduce.reducer import FlatReducer
from hpctrain.backends.torch.reduce.slots import Number, fill_slots
from hpctrain.reduce.flat_layout import ExchangeResult, Layout, read_slots
from hpctrain.train.clock import Phase, StepClock

PARTS = 4
"""Number of parts in which gradients arrive; each takes a call of the optimizer."""


class StreamedReducer(FlatReducer):
    """Sends the loss first: ``exchange`` waits for the loss only, and ``parts`` for gradients.

    Args:
        name, flat_gradients, sum_: see FlatReducer.
        arrive: StreamedAllreduce.arrive.
    """

    def __init__(
        self, name: str, flat_gradients: FlatGradients, sum_: TensorAllreduce, arrive: Callable[[float], object]
    ) -> None:
        super().__init__(name, flat_gradients, sum_)
        self.arrive = arrive
        self.has_sent_loss = False
        self.arrivals = flat_parts(flat_gradients.layout, PARTS)

    def before_backward(self, totals: Callable[[], tuple[Number, Number | None]]) -> None:
        """See Reducer."""
        if self.last_backward:
            self.send_loss(*totals())

    def send_loss(self, loss: Number, weight: Number | None) -> None:
        """Sends loss and weight, before the first gradient."""
        fill_slots(self.slots.zero_(), loss, weight)
        self.sum.start(self.flat_gradients.layout.gradients, self.flat_gradients.layout.length)
        self.has_sent_loss = True

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        if not self.has_sent_loss:  # there was no backward pass on this rank
            self.send_loss(loss, weight)
        self.has_sent_loss = False
        self.flat_gradients.complete()
        self.arrive(1)
        return read_slots(self.slots.tolist())

    def parts(self, clock: StepClock) -> Iterator[list[torch.Tensor]]:
        """Yields some gradients as soon as they have arrived; then only their parameters have ``grad`` set."""
        for part in self.arrivals:
            self.arrive(2 + part.last_bucket)  # the loss was sent first
            self.flat_gradients.publish(part.members)
            clock.mark(Phase.EXCHANGE)
            yield [self.sum.flat[part.elements]]
        self.finish()


@dataclass(frozen=True)
class FlatPart:
    """Adjacent buckets of the flat buffer."""

    last_bucket: int
    elements: slice
    members: list[int]
    """Indices of the parameters."""


def flat_parts(layout: Layout, most: int) -> list[FlatPart]:
    """Groups adjacent buckets into up to ``most`` nearly equal parts."""
    found: list[FlatPart] = []
    first, members = 0, list[int]()
    for number, bucket in enumerate(layout.buckets):
        begin = layout.buckets[first].begin
        members.extend(bucket.members)
        end = min(bucket.end, layout.gradients)
        if (end - begin) * most >= layout.gradients or number == len(layout.buckets) - 1:
            found.append(FlatPart(number, slice(begin, end), members))
            first, members = number + 1, []
    return found

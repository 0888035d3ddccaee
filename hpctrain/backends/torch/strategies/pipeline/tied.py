"""Parameters that layers of several stages share (tied embeddings): each of these stages has a copy of the same name.
In each update, the gradients of the copies are summed, so all copies stay equal."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.strategies.exchange import Exchange
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.strategies.pipeline.stage import TIED

WHAT = "add up the gradients of tied parameters"


@dataclass(frozen=True)
class Tied:
    """The copies that this stage has of parameters that other stages have too."""

    stage: int
    holders: Mapping[str, Sequence[int]]
    """Stages that have each tied parameter, by name."""
    messages: Exchange
    """Exchanges tensors between the stages."""

    def add(self, reducer: Reducer) -> None:
        """Sums the gradients of copies, which are sums over data-parallel ranks already. Collective.

        They are added in the order of stages, so copies stay bitwise equal.
        """
        found = []
        for name, one in reducer.summed():
            stages, gradient = self.holders.get(name, ()), one.grad
            if self.stage not in stages or gradient is None:
                continue
            parts = {stage: torch.empty_like(gradient, memory_format=torch.contiguous_format) for stage in stages}
            parts[self.stage].copy_(gradient)
            fetch = []
            for stage in stages:  # the lower stage of two posts first, as messages in order demand
                if self.stage < stage:
                    self.messages.post(parts[self.stage], stage, TIED)
                if self.stage != stage:
                    fetch.append(self.messages.expect(parts[stage], stage, TIED))
                if self.stage > stage:
                    self.messages.post(parts[self.stage], stage, TIED)
            found.append((gradient, parts, fetch))
        for gradient, parts, fetch in found:
            for wait in fetch:
                wait(WHAT)
            gradient.copy_(functools.reduce(torch.add, parts.values()))
        self.messages.settle(WHAT)

    def norm(self, partition: Partition, reducer: Reducer) -> float:
        """L2 norm of this stage's gradients; that of copies counts on the first stage that has one.

        Args:
            partition: the part of the layers that this rank has.
            reducer: has summed them.
        """
        first = {name: stages[0] for name, stages in self.holders.items()}
        counted = [(name, one) for name, one in reducer.summed() if first.get(name, self.stage) == self.stage]
        return partition.norm_of(counted)

"""``parallel.shard: gradients``: like ``optimizer``, but each rank also keeps only the summed gradients of its rows.

Its reducer sums each window of the flat buffer as soon as a backward pass has its gradients, and then frees them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.backends.torch.reduce.gradients import as_real, densify
from hpctrain.backends.torch.reduce.reducer import Number, common_kind, fill_slots
from hpctrain.backends.torch.strategies.estimated import Estimated
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate
from hpctrain.backends.torch.strategies.parameter_traits import ParameterTraits
from hpctrain.backends.torch.strategies.row_shares import RowWindow, windows_of
from hpctrain.backends.torch.strategies.sharded_exchange import Windows, open_windows
from hpctrain.backends.torch.strategies.strategy import Opening, Prepared, Strategy, needs_norm
from hpctrain.backends.torch.strategies.zero1 import OwnGradients, Sharded, largest_share, shard_optimizers
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.features import Feature
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import UserError
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import BUCKET_BYTES, SLOTS, WEIGHTED, ExchangeResult, read_slots
from hpctrain.reduce.shm_allreduce import chunks
from hpctrain.train.clock import Neighbours, Waiting

MORE = 0
"""Index of the flag for another pass in the values that ranks sum after each; then come a square and the slots."""


def in_memory(tensor: Tensor) -> Tensor:
    """All real numbers of a dense tensor as a flat view, in memory order."""
    return as_real(tensor.as_strided((tensor.numel(),), (1,))).view(-1)


class SlicedReducer(OwnGradients):
    """Sums gradients in windows; see reduce.reducer.Reducer.

    Ranks sum after each backward pass. A rank that has fewer passes than others adds zeros to theirs.
    """

    def __init__(self, name: str, source: SlicedReducers, windows: Windows, group: Group) -> None:
        self.name, self.source, self.windows, self.group = name, source, windows, group
        sharded, size = source.sharded, len(windows.own)
        ranges, device = sharded.shares.ranges, sharded.pairs[0][1].device
        self.first, end = ranges[sharded.rank].start, ranges[sharded.rank].stop
        self.sums = np.zeros(end - self.first, windows.own.dtype)
        super().__init__(sharded, torch.from_numpy(self.sums).to(device), source.optimizers)
        self.stage = None if device.type == "cpu" else torch.zeros(size, dtype=self.own.dtype, device=device)
        self.flat = {index: in_memory(one.data) for index, one in enumerate(self.parameters)}
        self.steps = windows_of(sharded.layout, 0, sharded.layout.gradients, size)
        """Windows in which gradients are summed."""
        self.spread_in = [windows_of(sharded.layout, one.start, one.stop, size) for one in ranges]
        """Windows in which each rank sends its range."""
        self.passes, self.under_way, self.sent = 0, False, 0
        self.ready: dict[int, Tensor] = {}
        """Gradients of this pass that are not yet summed, by parameter index."""
        self.handles = [
            one.register_post_accumulate_grad_hook(partial(self._take, index))
            for index, one in enumerate(self.parameters)
            if one.numel()
        ]

    def begin_pass(self, is_last: bool) -> None:
        if self.ready or self.sent:  # of the pass before; a forward pass has no gradients
            self._end_pass([1.0])
        self.under_way = True

    def begin(self) -> None:
        self.passes, self.under_way = 0, False
        for one in (*self.parameters, *self.mine):
            one.grad = None

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        self._require_parts()
        slots: list[Number] = [0.0] * SLOTS
        fill_slots(slots, loss, weight)
        totals = [0.0, 0.0, *map(float, slots[: WEIGHTED + 1])]
        while (sums := self._end_pass(totals))[MORE]:
            pass
        self.under_way = False
        if self._follow():
            self.flat = {index: in_memory(one.data) for index, one in enumerate(self.parameters)}
        if self.stage is not None:
            self.own.copy_(torch.from_numpy(self.sums))
        self._give()
        self.square = float(sums[1])
        return read_slots(sums[2:].tolist())

    def spread(self) -> bool:
        for turn in range(max(map(len, self.spread_in))):
            now = [each[turn] if turn < len(each) else RowWindow(0, 0, ()) for each in self.spread_in]
            self._fill(now[self.sharded.rank], self.flat)
            for rank, window in self.windows.others([one.end - one.begin for one in now]):
                values = torch.from_numpy(window)
                if self.stage is not None:
                    values = self.stage.copy_(values)
                for one in now[rank].spans:
                    self.flat[one.index][one.part].copy_(values[one.place])
        return True

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.begin()
        self.windows.close()

    def _take(self, index: int, parameter: Tensor) -> None:
        """Takes a gradient when it is ready."""
        if not self.under_way:  # of no update; ``begin`` drops it
            return
        if self.sharded.layout.offsets[index] // len(self.windows.own) < self.sent:
            raise UserError(
                f"the gradient of {self.names[id(parameter)]} changed after it was summed: a pass runs backward twice",
                "add up losses before one backward pass, or set parallel.shard: optimizer",
            )
        gradient = parameter.grad
        assert gradient is not None, "it is ready"
        if gradient.is_sparse:
            gradient = densify(self.names[id(parameter)], gradient, self.source.config.sparse)
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        self.ready[index] = in_memory(gradient.detach())
        while self.source.eager and self.sent < len(self.steps) and self.steps[self.sent].indices <= self.ready.keys():
            self._send()

    def _end_pass(self, totals: list[float]) -> NDArray[np.float64]:
        """Sums remaining windows, then loss, weights and the squared norm; missing gradients are zeros. Collective."""
        while self.sent < len(self.steps):
            self._send()
        self.passes, self.sent = self.passes + 1, 0
        own = np.zeros(2 + WEIGHTED + 1)
        own[: len(totals)] = totals
        if self.source.needs_norm and not totals[MORE]:
            parts = (self.sums[begin:end] for begin, end in chunks(0, len(self.sums)))
            own[1] = sum(float(np.dot(part, part)) for part in parts)
        with self.source.waiting:
            return np.asarray(self.group.gather(own, "add up their losses").sum(0))

    def _send(self) -> None:
        """Sums the next window, and frees gradients that end in it. Collective."""
        window = self.steps[self.sent]
        self._fill(window, self.ready)
        parts = window.parts(self.sharded.shares.ranges)
        own = parts[self.sharded.rank]
        total = self.sums[max(window.begin - self.first, 0) :][: own.stop - own.start]
        self.windows.add(parts, total, adds=self.passes > 0)
        for one in window.spans:
            if one.is_end:
                self.ready.pop(one.index, None)
                self.parameters[one.index].grad = None
        self.sent += 1

    def _fill(self, window: RowWindow, given: Mapping[int, Tensor]) -> None:
        """Copies values into this rank's window, with zeros where there are none."""
        host, end = torch.from_numpy(self.windows.own[: window.end - window.begin]), 0
        values = host if self.stage is None else self.stage[: len(host)]
        for one in window.spans:
            values[end : one.place.start].zero_()  # padding after the previous one
            if one.index in given:
                values[one.place].copy_(given[one.index][one.part])
            else:
                values[one.place].zero_()
            end = one.place.stop
        values[end:].zero_()
        if self.stage is not None:
            host.copy_(values)


@dataclass(frozen=True)
class SlicedReducers:
    """The only reducer of an optimizer's parameters; see ReducerSource."""

    sharded: Sharded
    config: ReduceConfig
    needs_norm: bool
    optimizers: Sequence[Optimizer]
    waiting: Waiting
    eager: bool = True
    """Whether windows are summed during backward passes; False if ranks exchange something else there."""
    sparse: Sequence[Parameter] = ()
    """Always empty: no gradient stays sparse."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        return [Candidate("mpi", "sliced")]

    def open(self, candidate: Candidate, group: Group) -> SlicedReducer:
        dtype = torch.empty(0, dtype=common_kind(self.sharded.pairs)[0]).numpy().dtype
        size = max(
            64, min((self.config.bucket_bytes or BUCKET_BYTES) // dtype.itemsize, self.sharded.layout.gradients // 8)
        )
        return SlicedReducer(candidate.name, self, open_windows(group, size, dtype, self.waiting), group)


def planned(opening: Opening) -> Strategy | None:
    """The strategy, if the run shards gradients. Raises UserError if an optimizer cannot be sharded."""
    return functools.partial(shard_rows, opening, opening.traits) if opening.divides(Feature.SHARD_GRADIENTS) else None


def shard_rows(opening: Opening, traits: ParameterTraits, prepared: Prepared) -> Prepared:
    """Gives each optimizer the rows that this rank updates, and makes parameters dense in memory."""
    reduce = opening.config.reduce
    for parameter in opening.model.parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():  # it has gaps
            parameter.data = parameter.data.clone()
    waiting, norm = Waiting(opening.clock, Neighbours.GRADIENTS), needs_norm(opening, prepared.partition)
    return shard_optimizers(
        opening,
        traits,
        prepared,
        lambda own: SlicedReducers(own, reduce, norm, opening.optimizers, waiting, eager=not opening.joins),
    )


def estimate(model: Estimated) -> MemoryEstimate:
    """See estimated.Estimate."""
    share = largest_share(model)
    return model.whole.scaled(gradients=share, optimizer=share)

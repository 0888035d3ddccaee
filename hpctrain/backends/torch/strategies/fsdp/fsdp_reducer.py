"""The sums of FSDP2 as a reducer: gradients are summed, and freed, in backward passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpctrain.backends.torch.process_groups import DefaultGroup
from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.reduce.slots import Number, fill_slots, read
from hpctrain.backends.torch.strategies.fsdp.complete_sums import complete_sums
from hpctrain.backends.torch.strategies.fsdp.layer_order import COMPARED_UPDATES
from hpctrain.backends.torch.strategies.fsdp.sharded_model import FullySharded, local_of
from hpctrain.backends.torch.strategies.partition import squares_of
from hpctrain.errors import UserError
from hpctrain.reduce.flat_layout import SLOTS, SQUARE, ExchangeResult, read_slots


@dataclass(eq=False)
class FullyShardedReducer(Reducer):
    """See reduce.reducer.Reducer. FSDP2 has already summed gradients at the end of the last backward pass, except for
    those of scalars, which it ignores: they are summed together with the loss.
    """

    name: str
    """Name of the candidate."""
    partition: FullySharded
    """The model's partition."""
    ranks: DefaultGroup
    """The process group of ``torch.distributed``; closed with the reducer."""
    needs_norm: bool = False
    """Whether each update needs the gradient norm, which is then summed together with the loss, too."""
    square: float = 0.0
    updates: int = 0

    def __post_init__(self) -> None:
        self.every = [one for one in self.partition.every if one.own.requires_grad]
        self.memory = [(one, one.module.untyped_storage()) for one in self.partition.every]

    def begin_pass(self, is_last: bool, goes_on: bool = False) -> None:
        self.partition.order.begin_backward()
        root, keeps = self.partition.modules[0], self.partition.keeps
        if is_last and not keeps:
            complete_sums(self.partition.modules)
        root.set_is_last_backward(is_last or keeps)
        root.set_requires_gradient_sync(is_last or keeps)
        # A rank whose next pass is over borrowed samples first reads the model's state_dict, which frees its layers.
        root.set_reshard_after_backward(not (keeps and goes_on))

    def begin(self) -> None:
        self._require_memory()
        self.updates += 1
        if self.updates > COMPARED_UPDATES:
            self.partition.order.close()
        self.partition.free()  # a pass without a backward pass has gathered weights that may have changed since
        for one in self.every:
            one.module.grad = one.own.grad = None

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        for one in self.every:
            gradient = one.module.grad
            if gradient is None:
                one.own.grad = torch.zeros_like(one.own) if one.module.requires_grad else None
            elif one.rows is not None:
                one.own.grad = local_of(gradient)
        scalars = [one.own.grad for one in self.every if one.rows is None and one.own.grad is not None]
        numbers: list[Number] = [0.0] * SLOTS
        fill_slots(numbers, loss, weight)
        if self.needs_norm:
            rows = [one.own.grad for one in self.every if one.rows is not None and one.own.grad is not None]
            numbers[SQUARE] = squares_of(rows).sum().to(self.partition.groups.mesh.device_type)
        sums = np.array(read([*numbers, *scalars]))
        self.partition.groups.data.add(sums, "add up their losses")
        for scalar, summed in zip(scalars, sums[SLOTS:], strict=True):
            scalar.fill_(summed)
        self.square = float(sums[SQUARE]) / self.partition.groups.copies + float((sums[SLOTS:] ** 2).sum())
        return read_slots(sums[:SLOTS].tolist())

    def gradients(self) -> list[Tensor]:
        return [one.own.grad for one in self.every if one.own.grad is not None]

    def summed(self) -> list[tuple[str, Tensor]]:
        """See Reducer; scalars, which all ranks have, count on the first rank of each copy only."""
        every = [one for one in self.every if one.rows is not None or self.partition.updaters.rank == 0]
        return [(one.name, one.own) for one in every]

    def norm(self) -> float:
        return math.sqrt(self.square)

    def close(self) -> None:
        self.ranks.close()

    def _require_memory(self) -> None:
        """Raises UserError if a parameter was moved to other memory, which DTensors do not notice."""
        for one, before in self.memory:
            if one.module.untyped_storage()._cdata != before._cdata:
                raise UserError(
                    f"the task has given {one.name} other memory (.data = ...), which has no effect where "
                    "parallel.shard gathers layers",
                    "change it in place, under torch.no_grad(), as clamp_ and copy_ do; or set "
                    "parallel.shard: optimizer",
                )

"""The part of a model's state that a pipeline stage saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpctrain.backends.named_state import HELD, parameter_of
from hpctrain.comm.world import World
from hpctrain.train.state import Cut, Placement, StateTensor


@dataclass(frozen=True)
class StageState:
    """What this rank's stage has."""

    world: World
    names: Collection[str]
    """Names of its parameters."""
    holders: Mapping[str, Sequence[int]]
    """Stages that have each tied parameter, by name."""
    elsewhere: Sequence[Tensor]
    """Parameters of other stages, kept so that their ids are not reused."""

    def placed(self, tensors: Iterable[StateTensor]) -> list[StateTensor]:
        """Selects the state that this rank saves: parameters' state is saved by ranks of their stage, random states by
        the first stage, and what the loss holds by the last one."""
        found: list[StateTensor] = []
        data = self.world.data
        own = self.world.tensor
        stage = self.world.pipeline.rank
        for tensor in tensors:
            name, cut = parameter_of(tensor.name), tensor.cut
            if tensor.placement is Placement.REPLICATED and name in self.names:
                cut = Cut(tensor.shape, (0,) * len(tensor.shape), data.rank * own.size + own.rank, data.size * own.size)
            if cut is not None:
                stages = tuple(self.holders.get(name or "", [stage]))
                copy = stages.index(stage) * cut.copies + cut.copy
                copies = len(stages) * cut.copies
                cut = dataclasses.replace(cut, copy=copy, copies=copies, stages=stages)
                found.append(dataclasses.replace(tensor, placement=Placement.CUT, cut=cut))
            elif self._saves(tensor):
                found.append(tensor)
        return found

    def _saves(self, tensor: StateTensor) -> bool:
        if tensor.placement is not Placement.RANK or tensor.name.startswith("model/"):
            return True
        pipeline = self.world.pipeline
        return pipeline.rank == (pipeline.size - 1 if tensor.name.startswith(HELD) else 0)

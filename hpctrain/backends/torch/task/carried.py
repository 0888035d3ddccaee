"""State of a recurrent network that is carried from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, Training
from hpctrain.train.stateful import kept_state


class CarriedState:
    """A recurrent network's state after the last batch: a lane for each of this rank's samples; see LaneSampler.

    A task declares it, ``state={"lanes": PerRank(carried, on_other_ranks="split")}``, and has it begin again with each
    epoch, ``hooks=[carried.new_each_epoch()]``. Its ``forward`` asks for the state before a batch, and keeps the next.

    Args:
        axis: of the lanes in each tensor; 1 is that of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``.
    """

    def __init__(self, axis: int = 1) -> None:
        self.axis = axis
        self.hidden: Any = None
        """A tensor, or tensors in tuples, lists and dicts; None at a beginning."""

    def get(self, model: torch.nn.Module) -> Any:
        """The state before this batch; None at the beginning of an epoch, and while ``model`` does not train."""
        return self.hidden if model.training else None

    def keep(self, model: torch.nn.Module, hidden: Any) -> None:
        """Notes the state behind this batch, without its history; nothing while ``model`` does not train."""
        if model.training:
            self.hidden = mapped(torch.Tensor.detach, hidden)

    def new_each_epoch(self) -> BaseHook:
        """A hook that forgets the state at the end of each epoch: the text begins again."""
        return NewEachEpoch(self)

    def state_dict(self) -> dict[str, Any]:
        """See PerRank."""
        return {"hidden": self.hidden}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See PerRank."""
        self.hidden = saved["hidden"]

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All lanes, in the order of the ranks."""
        parts = [state["hidden"] for state in states if state["hidden"] is not None]
        return {"hidden": mapped(lambda *each: torch.cat(each, self.axis), *parts) if parts else None}

    def split(self, whole: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
        """As many lanes as the rank has samples in a batch."""

        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.tensor_split(ranks, self.axis)[rank].contiguous()

        return {"hidden": None if whole["hidden"] is None else mapped(part, whole["hidden"])}


class NewEachEpoch(BaseHook):
    """See CarriedState.new_each_epoch."""

    def __init__(self, carried: CarriedState) -> None:
        self.carried = carried

    def after_step(self, training: Training, result: StepResult) -> None:
        """The batch was the last of its epoch, or not."""
        if training.state.batch == 0:
            self.carried.load_state_dict({"hidden": None})


def carried_by(task: TorchTask) -> str | None:
    """Which state that a task declares is carried from batch to batch, for a person; None if there is none.

    Raises UserError if it is not declared as each rank's own.
    """
    carried = [one for one in kept_state(task.state) if isinstance(one.value, CarriedState)]
    for shared in (one for one in carried if one.rule is None):
        raise UserError(
            f"{shared.spoken} is a CarriedState, and not in PerRank: a resume would give all ranks the lanes of rank 0",
            'write PerRank(carried, on_other_ranks="split")',
        )
    return carried[0].spoken if carried else None


def mapped(function: Callable[..., torch.Tensor], first: Any, *others: Any) -> Any:
    """Applies the function to the tensors at each place of equal structures."""
    if isinstance(first, Mapping):
        return {name: mapped(function, first[name], *(each[name] for each in others)) for name in first}
    if isinstance(first, (tuple, list)):
        values = [mapped(function, *each) for each in zip(first, *others, strict=True)]
        return tuple(values) if isinstance(first, tuple) else values
    return function(first, *others)

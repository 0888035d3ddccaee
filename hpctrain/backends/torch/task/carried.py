"""Recurrent state that is carried from batch to batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from hpctrain.errors import UserError
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, Training
from hpctrain.train.stateful import kept_state


class CarriedState:
    """A recurrent network's state after the last batch, with one lane for each of this rank's samples; see LaneSampler.

    A task declares it with ``state={"lanes": PerRank(carried, on_other_ranks="split")}`` and resets it each epoch with
    ``hooks=[carried.new_each_epoch()]``. Its ``forward`` gets the state before a batch and keeps the one after it.

    Args:
        axis: axis of the lanes in each tensor; 1 for ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``.
    """

    def __init__(self, axis: int = 1) -> None:
        self.axis = axis
        self.hidden: Any = None
        """A tensor, or nested tuples, lists and dicts of tensors; None at the start of an epoch."""

    def get(self, model: torch.nn.Module) -> Any:
        """Returns the state before this batch; None at the start of an epoch, and while ``model`` does not train."""
        return self.hidden if model.training else None

    def keep(self, model: torch.nn.Module, hidden: Any) -> None:
        """Keeps ``hidden``, detached, as the state after this batch; does nothing while ``model`` does not train."""
        if model.training:
            self.hidden = tree_map(torch.Tensor.detach, hidden)

    def new_each_epoch(self) -> BaseHook:
        """Returns a hook that resets the state at the end of each epoch, when the text starts over."""
        return NewEachEpoch(self)

    def state_dict(self) -> dict[str, Any]:
        """See PerRank."""
        return {"hidden": self.hidden}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """See PerRank."""
        self.hidden = saved["hidden"]

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Concatenates the lanes of all ranks, in order."""
        parts = [state["hidden"] for state in states if state["hidden"] is not None]
        return {"hidden": tree_map(lambda *each: torch.cat(each, self.axis), *parts) if parts else None}

    def split(self, whole: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
        """Returns this rank's lanes, one for each of its samples in a batch."""

        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.tensor_split(ranks, self.axis)[rank].contiguous()

        return {"hidden": tree_map_only(torch.Tensor, part, whole["hidden"])}


class NewEachEpoch(BaseHook):
    """See CarriedState.new_each_epoch."""

    def __init__(self, carried: CarriedState) -> None:
        self.carried = carried

    def after_step(self, training: Training, result: StepResult) -> None:
        """Resets the state after the last batch of an epoch."""
        if training.state.batch == 0:
            self.carried.load_state_dict({"hidden": None})


def carried_by(task: TorchTask) -> str | None:
    """Describes the carried state that a task declares; None if there is none.

    Raises UserError if it is not declared as PerRank.
    """
    carried = [one for one in kept_state(task.state) if isinstance(one.value, CarriedState)]
    for shared in (one for one in carried if one.rule is None):
        raise UserError(
            f"{shared.label} is a CarriedState, and not in PerRank: a resume would give all ranks the lanes of rank 0",
            'write PerRank(carried, on_other_ranks="split")',
        )
    return carried[0].label if carried else None

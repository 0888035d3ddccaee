"""Compares, in the first updates, which layers the ranks of a sharded model compute, and in which order."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.nn import Module

from hpctrain.comm.group import Group
from hpctrain.errors import UserError

COMPARED_UPDATES = 8
"""Updates in which ranks compare the order of their layers: those that choose layers differently do so early."""
END = "the end of a forward pass"
"""What follows the last layer."""
BACKWARD = "a backward pass"


class LayerOrder:
    """Makes forward passes raise UserError, on all ranks, if they do not compute the same layers in the same order,
    or not as often: ranks would take rows of different layers for one.

    On GPUs, where the host does not wait for a gather, ranks compare at the end of a pass. On CPUs, where a rank would
    wait for a gather that another one never begins, before each gather.

    Args:
        layers: the layers that are gathered, one after the other.
        model: the model that they are part of.
        group: the ranks.
        waits: whether gathering waits for other ranks.
    """

    def __init__(self, layers: Sequence[Module], model: Module, group: Group, waits: bool) -> None:
        self.group, self.waits = group, waits
        name_of = {id(module): name for name, module in model.named_modules()}
        self.names = ["the model", *(name_of[id(layer)] for layer in layers), END, BACKWARD]
        self.reached: list[int] = []
        """Places that this pass has reached, as indices of ``names``."""
        self.hooks = [
            one.register_forward_pre_hook(functools.partial(self.reach, place), prepend=True)
            for place, one in enumerate((model, *layers))
        ]
        self.hooks.append(model.register_forward_hook(functools.partial(self.reach, len(self.names) - 2)))

    def reach(self, place: int, *ignored: Any) -> None:
        """Records a place, and compares it with the other ranks' if they can be waited for."""
        if not place:
            self.reached.clear()
        self.reached.append(place)
        if not self.waits and place < len(self.names) - 2:
            return
        if self.group.same(zlib.crc32(np.array(self.reached).tobytes()), "compute the same layers"):
            return
        passes = self.group.allgather(self.reached, "say which layers they have computed")
        differing = (depth for depth, places in enumerate(zip(*passes, strict=False)) if len(set(places)) > 1)
        depth = next(differing, -1)  # the last place, if one rank calls the model more often
        first, *others = [self.names[reached[depth]] for reached in passes]
        raise UserError(
            f"the ranks' forward passes differ while parallel.shard gathers layers: one has reached {first}, another "
            f"{next(one for one in others if one != first)}",
            "call the model equally often on all ranks, and choose layers by values that are equal on all, not by "
            "a rank's own samples or random numbers; or set parallel.shard: optimizer",
        )

    def begin_backward(self) -> None:
        """Compares ranks before a backward pass, which others wait for if they call the model once more."""
        if self.hooks:
            self.reach(len(self.names) - 1)

    def close(self) -> None:
        """Ends the comparison."""
        while self.hooks:
            self.hooks.pop().remove()

"""Leaves of the trees that objects of a torch task save: values of the host, and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.backends.torch.state.tensors import TorchTensor, tensor_of
from hpctrain.system.array_types import Array
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.tree import Leaves

HOST, DEVICE = "host", "device"
"""Device of a tensor, in its kind."""


class TorchLeaves(Leaves):
    """Leaves plus tensors.

    Args:
        device: device of tensors that were not on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def kind(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return super().kind(value)
        if value.layout is not torch.strided or value.is_quantized:
            return None
        place = HOST if value.device.type == "cpu" else DEVICE
        return f"{place} uint16" if value.dtype == torch.uint16 else place  # stored like bfloat16

    def tensor(self, name: str, value: Any, placement: Placement) -> StateTensor:
        return (
            TorchTensor(name, value, placement) if isinstance(value, Tensor) else super().tensor(name, value, placement)
        )

    def value(self, kind: str, array: Array) -> Any:
        place, _, dtype = kind.partition(" ")
        if place not in (HOST, DEVICE):
            return super().value(kind, array)
        tensor = torch.from_numpy(np.array(array)) if dtype else tensor_of(array)
        return tensor.to(self.device if place == DEVICE else "cpu")

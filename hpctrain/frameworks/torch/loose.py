"""Numbers, arrays and tensors that a task keeps in plain attributes, of which nobody says that they are state."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.errors import UserError
from hpctrain.frameworks.torch.state import TorchTensor, digest, tensor_of
from hpctrain.train.reach import Place
from hpctrain.train.state import ArrayTensor, Placement, StateTensor

MOST_BYTES = 16 << 20
"""Of a tensor or array that is looked at although each rank has its own: a larger one is data."""


def is_loose(value: Any, most_bytes: float) -> bool:
    """Whether a value in a plain attribute is one that may be state."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.device.type != "meta" and value.nbytes <= most_bytes
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufc" and value.nbytes <= most_bytes
    return isinstance(value, (bool, int, float))


def is_array(place: Place) -> bool:
    """Whether it is more than a number."""
    return isinstance(place.value, (Tensor, np.ndarray))


def sign(value: Any) -> str:
    """Changes when a number, array or tensor does."""
    if isinstance(value, Tensor):
        return digest([value])
    return hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else repr(value)


def can_put(place: Place) -> bool:
    """Whether another value can take a value's place, or be copied into it."""
    return place.put is not None or isinstance(place.value, Tensor)


def loose_tensor(name: str, place: Place, placement: Placement) -> StateTensor:
    """A value under a name. Raises UserError if it could not be put back."""
    if not can_put(place):
        raise UserError(
            f"the task keeps {place.path}, which changes, where it cannot be put back",
            "keep it in an attribute, a list or a dict rather than in a tuple",
        )
    if isinstance(place.value, Tensor):
        return TorchTensor(name, place.value, placement)
    return ArrayTensor(name, np.array(place.value), placement)


def put_back(place: Place, saved: NDArray[Any]) -> None:
    """Puts a saved value where it was. Raises UserError if it does not fit."""
    value = place.value
    if isinstance(value, Tensor) and value.shape == saved.shape:
        TorchTensor(place.path, value).assign(saved)
    elif place.put is None or (saved.ndim and not is_array(place)):
        raise UserError(f"what was saved of {place.path} does not fit", "load it into the task that it was saved from")
    elif isinstance(value, Tensor):
        place.put(tensor_of(saved).to(value.device))
    else:
        place.put(np.array(saved) if isinstance(value, np.ndarray) else type(value)(saved))

"""Numbers that are exchanged with gradients: loss, weight, norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hpctrain.backends.torch import accelerator
from hpctrain.reduce.flat_layout import LOSS, WEIGHT, WEIGHTED

Number: TypeAlias = float | torch.Tensor
"""A float, or a scalar tensor on any device."""


def fill_slots(slots: Tensor | list[Number], loss: Number, weight: Number | None) -> None:
    """Puts this rank's part of the loss, and its weight if there is one, into zeroed slots."""
    slots[LOSS] = loss
    if weight is not None:
        slots[WEIGHT] = weight
        slots[WEIGHTED] = 1.0


def read_behind(numbers: Tensor, act: Callable[[Tensor], object] | None) -> list[float]:
    """Reads numbers from a device, which meanwhile has what ``act(numbers)`` gives it to do."""
    if act is None:
        return numbers.tolist()
    there = numbers.to("cpu", non_blocking=True)
    wait = accelerator.reaching_here(numbers.device)
    act(numbers)
    wait()
    return there.tolist()


def norms_of(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """L2 norm of each tensor; of 16 bits in float32, since their own dtype has two or three digits."""
    kinds = {one.dtype for one in tensors}
    wide = functools.reduce(torch.promote_types, kinds, torch.float32)
    has_halves = not wide.is_complex and any(kind.itemsize == 2 for kind in kinds)
    return tuple(torch._foreach_norm(list(tensors), 2, wide if has_halves else None))


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm over all elements of all tensors, on their device."""
    if not tensors:
        return torch.zeros((), device="cpu")
    norms = norms_of(tensors)
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def read(numbers: Sequence[Number]) -> list[float]:
    """Numbers as floats; those on a device are read together, in one wait for it."""
    there = [one.detach().double().view(()) for one in numbers if isinstance(one, Tensor)]
    found = iter(torch.stack(there).tolist() if there else [])
    return [next(found) if isinstance(one, Tensor) else one for one in numbers]

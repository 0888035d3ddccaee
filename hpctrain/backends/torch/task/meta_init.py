"""Models whose parameters were made on the meta device: they get memory once they are cut, and values from a file."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn import Module, Parameter

from hpctrain.backends.named_state import plain_name
from hpctrain.backends.torch.state.optimizer import Part
from hpctrain.backends.torch.strategies.strategy import Opening, Prepared, Strategy
from hpctrain.errors import UserError

MADE = "the task made it on the meta device"


def parameters_on_meta(model: Module, parts: Sequence[Part]) -> list[str]:
    """Names of the parameters that are on the meta device.

    Raises UserError if buffers are, or optimizers hold something there: no file would be sure to have that.
    """
    found = [plain_name(name) for name, parameter in model.named_parameters() if parameter.is_meta]
    buffer = next((name for name, one in model.named_buffers() if one.is_meta), None)
    if buffer is not None:
        raise UserError(
            f"the buffer {buffer} of the model has no values: {MADE}",
            'make buffers with values: torch.arange(n, device="cpu") in the module, or torch.device("meta") around '
            "layers that have none",
        )
    for part in parts:
        slots = (slot for state in part.optimizer.state.values() for slot in state.values())
        if any(isinstance(slot, torch.Tensor) and slot.is_meta for slot in slots):
            raise UserError(
                f"{type(part.optimizer).__name__} holds state from the start, and for parameters without values: the "
                "task made them on the meta device",
                "use an optimizer that makes its state in its first step, such as AdamW, or make the model with values",
            )
    return found


def move(model: Module, device: torch.device, memory_format: torch.memory_format) -> None:
    """Brings what has values to a device; what has none stays on the meta device."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device, memory_format=memory_format)  # type: ignore[call-overload]
        return
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def planned(opening: Opening) -> Strategy:
    """For parameters that this rank keeps."""
    return functools.partial(materialize, opening)


def materialize(opening: Opening, prepared: Prepared) -> Prepared:
    """Parameters on the meta device get memory, once other strategies have cut them."""
    give_memory(opening.model, opening.compute.device)
    return prepared


def give_memory(model: Module, device: torch.device) -> None:
    """Puts zeros in place of parameters on the meta device; they stay the same objects to whoever holds them."""
    for parameter in model.parameters():
        if parameter.is_meta:
            made = Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
            made.__dict__.update(vars(parameter))
            torch.utils.swap_tensors(parameter, made)

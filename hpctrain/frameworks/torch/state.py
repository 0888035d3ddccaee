"""Names of the tensors that make up a torch model, its optimizer and its random states, and copies of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hpctrain.errors import UserError
from hpctrain.frameworks.host_random import host_random_state, restore_host_random_state
from hpctrain.train.state import ArrayTensor, Placement, StateTensor

NUMBER = ".number"
"""Ends the slot names of optimizer state that is a Python number."""


@dataclass(frozen=True)
class TorchTensor:
    """A StateTensor over a torch tensor."""

    name: str
    tensor: Tensor
    placement: Placement = Placement.REPLICATED
    is_trained: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """Logical dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def copy_into(self, out: NDArray[Any], first_row: int = 0) -> None:
        """See StateTensor; asynchronous where the tensor is on a GPU and ``out`` is page-locked."""
        source = self.tensor.detach()
        if out.ndim:
            source = source[first_row : first_row + len(out)]
        host_tensor(out, self.tensor.dtype).copy_(source, non_blocking=True)

    def assign(self, value: NDArray[Any]) -> None:
        """Takes over a host array as ``copy_into`` gives it."""
        with torch.no_grad():
            self.tensor.copy_(host_tensor(np.require(value, requirements=["C", "W"]), self.tensor.dtype))


def host_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A writable host array as a tensor over the same memory; bfloat16 is held as uint16."""
    return torch.from_numpy(array.view(np.int16)).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(array)


def model_tensors(model: Module) -> list[TorchTensor]:
    """Parameters, then persistent buffers, each in the order of their modules.

    Buffers are each rank's own: what a forward pass changes there (running statistics) follows the rank's samples.
    """
    kept = model.state_dict(keep_vars=True).keys()
    return [
        *(
            TorchTensor(f"model/{name}", parameter.data, is_trained=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        ),
        *(
            TorchTensor(f"model/{name}", buffer, Placement.RANK)
            for name, buffer in model.named_buffers()
            if name in kept
        ),
    ]


def other_names(model: Module) -> dict[str, str]:
    """Names under which ``state_dict`` holds a shared tensor once more (tied weights), and the one it is saved by."""
    first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    held = {name: first.get(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: saved for name, saved in held.items() if name != saved}


def optimizer_tensors(optimizer: Optimizer, names: Mapping[int, str]) -> list[StateTensor]:
    """``optimizer/<slot>/<parameter>``, from the names of parameters by id; empty before the first update.

    Raises:
        UserError: the optimizer holds what is neither tensor nor number.
    """
    tensors: list[StateTensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors.append(TorchTensor(f"optimizer/{slot}/{names[id(parameter)]}", value))
                elif isinstance(value, (bool, int, float)):
                    name = f"optimizer/{slot}{NUMBER}/{names[id(parameter)]}"
                    tensors.append(ArrayTensor(name, np.array(value, np.float64)))
                elif value is not None:
                    raise UserError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of a parameter",
                        "use an optimizer whose state is tensors and numbers: others cannot be saved",
                    )
    return tensors


def group_numbers(optimizer: Optimizer) -> dict[str, float]:
    """Numbers of the parameter groups by name, but for the rates: some optimizers count or adapt there."""
    return {
        f"optimizer/group{NUMBER}/{index}/{key}": float(value)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "lr" and isinstance(value, (bool, int, float))
    }


def load_groups(optimizer: Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Takes over the numbers of parameter groups that are there."""
    for name in group_numbers(optimizer).keys() & arrays.keys():
        index, key = name.split("/")[2:]
        group = optimizer.param_groups[int(index)]
        group[key] = type(group[key])(arrays[name])


def load_optimizer(optimizer: Optimizer, names: Mapping[int, str], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Gives each parameter the optimizer state of its name, on its own device."""
    slots: dict[str, dict[str, NDArray[Any]]] = {}
    for key, value in arrays.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            slot, _, path = rest.partition("/")
            slots.setdefault(path, {})[slot] = value
    known = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        found = slots.get(names[id(parameter)], {})
        if found:
            state[index] = {slot.removesuffix(NUMBER): _slot(slot, value, parameter) for slot, value in found.items()}
    optimizer.load_state_dict({"state": state, "param_groups": known["param_groups"]})
    for index, values in state.items():  # it gives them the parameter's type: an optimizer may keep another one
        held = optimizer.state[parameters[index]]
        for slot, value in values.items():
            if isinstance(value, Tensor) and isinstance(held[slot], Tensor) and held[slot].dtype != value.dtype:
                held[slot] = value.to(held[slot].device)


def _slot(slot: str, value: NDArray[Any], parameter: Tensor) -> Tensor | float:
    if slot.endswith(NUMBER):
        number = float(value)
        return int(number) if number.is_integer() else number
    held = np.require(value, requirements=["C", "W"])
    copy = host_tensor(held, torch.bfloat16 if held.dtype == np.uint16 else torch.float32).clone()
    if copy.shape == parameter.shape:  # same memory format as the parameter, so that fused updates stay fast
        return torch.empty_like(parameter, dtype=copy.dtype, device="cpu").copy_(copy)
    return copy


def random_tensors(device: torch.device) -> list[ArrayTensor]:
    """This rank's random states."""
    arrays = host_random_state() | {"rng/torch": torch.get_rng_state().numpy()}
    if device.type == "cuda":
        arrays["rng/torch_cuda"] = torch.cuda.get_rng_state(device).numpy()
    return [ArrayTensor(name, array, Placement.RANK) for name, array in arrays.items()]


def load_random(device: torch.device, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Takes over the random states that are there; a rank that is new keeps its own seed."""
    restore_host_random_state(arrays)
    if "rng/torch" in arrays:
        torch.set_rng_state(torch.from_numpy(np.array(arrays["rng/torch"], np.uint8)))
    if device.type == "cuda" and "rng/torch_cuda" in arrays:
        torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays["rng/torch_cuda"], np.uint8)), device)


def load_tensors(tensors: Iterable[TorchTensor], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Assigns all values by name, or none where a replicated one is missing or one has another shape."""
    wanted = list(tensors)
    for tensor in wanted:
        if tensor.name not in arrays:
            if tensor.placement is Placement.RANK:
                continue
            raise UserError(
                f"{tensor.name} is missing from what is to be loaded",
                "load it into the model that it was saved from",
            )
        shape = arrays[tensor.name].shape
        if shape != tensor.shape:
            raise UserError(
                f"{tensor.name} has shape {list(tensor.shape)} here and {list(shape)} in what is to be loaded",
                "load it into the model that it was saved from",
            )
    for tensor in wanted:
        if tensor.name in arrays:
            tensor.assign(arrays[tensor.name])


def digest(tensors: Sequence[Tensor]) -> str:
    """SHA-256 over the values in order, hexadecimal."""
    everything = hashlib.sha256()
    for tensor in tensors:
        everything.update(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)
    return everything.hexdigest()

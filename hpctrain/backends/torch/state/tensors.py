"""Named tensors of a torch model, its optimizer and random states; reads and writes weight files."""

from __future__ import annotations

import io
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.nn import Module

from hpctrain.backends.named_state import INNER, Assignable, endings, plain_name
from hpctrain.backends.named_state import digest as digest_of
from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.strategies.partition import Partition, Slices
from hpctrain.errors import UserError, kind_of
from hpctrain.system.array_types import Array
from hpctrain.train.seeds import host_random_state, restore_host_random_state
from hpctrain.train.state import ArrayTensor, Placement, part_of

CPU = torch.device("cpu")
NUMBER = ".number"
"""Suffix of names of optimizer slots that are Python numbers."""


class TorchTensor(Assignable):
    """A StateTensor over a torch tensor."""

    @property
    def dtype(self) -> str:
        """Dtype of the tensor, such as float32 or bfloat16."""
        return str(self.value.dtype).removeprefix("torch.")

    def copy_into(self, out: Array, begin: Sequence[int] = ()) -> None:
        """See StateTensor. Asynchronous if the tensor is on a GPU and ``out`` is page-locked."""
        source = self.value.detach()
        if source.shape != out.shape:  # for small tensors slicing costs as much as copying
            source = source[part_of(begin, out.shape)]
        host_tensor(out, self.value.dtype).copy_(source, non_blocking=True)

    def assign(self, value: Array, first_row: int = 0) -> None:
        """Assigns a host array in the format of ``copy_into``. Autograd does not notice: backward passes may follow."""
        target = self.value.data[first_row : first_row + len(value)] if value.ndim else self.value.data
        target.copy_(host_tensor(np.require(value, requirements=["C", "W"]), self.value.dtype))

    @contextmanager
    def loading(self) -> Iterator[Callable[[Array, int], None]]:
        """Loads rows by copying them to their places as they arrive."""
        yield self.assign


def tensors_of(
    name: str,
    tensor: torch.Tensor,
    slices: Slices | None,
    placement: Placement = Placement.REPLICATED,
    is_trained: bool = False,
) -> list[TorchTensor]:
    """Wraps a tensor of the state; for a partitioned parameter, one for each part on this rank."""
    if slices is None:
        return [TorchTensor(name, tensor, placement, is_trained)]
    return [TorchTensor(name, view, Placement.CUT, is_trained, cut) for view, cut in slices.views(tensor)]


def host_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Wraps a writable host array as a tensor over the same memory; bfloat16 is stored as uint16."""
    return torch.from_numpy(array.view(np.int16)).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(array)


def tensor_of(value: Array) -> torch.Tensor:
    """Copies a saved array to a tensor on the host."""
    array = np.require(value, requirements=["C", "W"])
    return host_tensor(array, torch.bfloat16 if array.dtype == np.uint16 else torch.float32).clone()


def saved_buffers(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's buffers, except for those registered with ``persistent=False``."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        for name in each._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name not in left_out)


def module_tensors(module: Module) -> Iterator[tuple[str, torch.Tensor, Placement]]:
    """A module's parameters, then its saved buffers, each in the order of the modules.

    They are not read from ``state_dict``, which a model may override, or hooks change, so that it lacks or renames
    some. Names are those without ``torch.compile``. Buffers are per rank: what a forward pass changes in them (running
    statistics) depends on the rank's samples.
    """
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter.data, Placement.REPLICATED
    for name, buffer in saved_buffers(module):
        yield plain_name(name), buffer, Placement.RANK


ADDED_KEYS = "+"
"""Name of what is added to ``state_dict``, in place of a module's among extra state."""
Layout = dict[str, int | str]
"""Identities of parameters, and types and shapes of buffers, by name."""


def layout_of(model: Module, own: Partition) -> Layout:
    """What must stay as it is while a model is trained, or a resumed run could not load what was saved."""
    parameters = {plain_name(name): id(one) for name, one in own.parameters(model)}
    return parameters | {plain_name(name): f"{one.dtype}{list(one.shape)}" for name, one in saved_buffers(model)}


def memory_of(value: Any) -> int:
    """Address of the storage of a plain dense tensor; 0 for other values."""
    is_dense = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested
    return value.untyped_storage().data_ptr() if is_dense else 0


def shared_buffers(model: Module) -> dict[str, torch.Tensor]:
    """Saved buffers that share memory with plain attributes, so that what is loaded into one changes the other."""
    places: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            places.update(map(memory_of, value if isinstance(value, (list, tuple)) else [value]))
    places.discard(0)
    return {name: buffer for name, buffer in saved_buffers(model) if memory_of(buffer) in places}


def require_same_memory(shared: Mapping[str, torch.Tensor], model: Module) -> None:
    """Raises UserError if such a buffer has other memory now: in a resumed run it would still share it."""
    for name, buffer in saved_buffers(model) if shared else ():
        if name in shared and memory_of(buffer) != memory_of(shared[name]):
            raise UserError(
                f"{plain_name(name)} of the model shares memory with a plain attribute until a pass replaces it: a "
                "resumed run would load it into both",
                "register a copy of the tensor (clone()), or change the buffer in place",
            )


def require_same_layout(before: Layout, now: Layout) -> None:
    """Raises UserError if parameters or saved buffers were added, removed, replaced or reshaped."""
    for name in before | now:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        change = "is another parameter"
        if old is None or new is None:
            change = "is new" if old is None else "is gone"
        elif isinstance(old, str) and isinstance(new, str):
            change = f"was {old} and is {new}"
        raise UserError(
            f"{name} of the model {change} since the task returned it: the optimizer would not update it, or a "
            "resumed run would not have it",
            "give the model its final parameters and buffers in the task, and buffers their final shape; register a "
            "buffer that is only a cache with persistent=False",
        )


def added_keys(model: Module) -> dict[str, Any]:
    """What an override or a hook adds to ``state_dict``: neither parameters nor saved buffers nor extra state."""
    if not any(map(may_add_keys, model.modules())):
        return {}
    known = list(module_tensors(model))
    names = {name for name, _, _ in known}
    ends = {end for name in names for end in endings(name)}
    memory = {tensor.data_ptr() for _, tensor, _ in known if tensor.numel()}

    def is_known(key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return key.endswith("_extra_state")
        return key in ends or not names.isdisjoint(endings(key)) or value.data_ptr() in memory

    return {key: value for key, value in model.state_dict().items() if not is_known(plain_name(key), value)}


def may_add_keys(module: Module) -> bool:
    """Whether ``state_dict`` must be asked: under FSDP2 that frees what this rank, and no other, has gathered."""
    own = (module.state_dict, Module.state_dict), (module._save_to_state_dict, Module._save_to_state_dict)
    changed = any(getattr(method, "__func__", None) is not usual for method, usual in own)
    return changed or bool(module._state_dict_hooks)


def model_tensors(model: Module, equal: Container[str] = (), own: Partition | None = None) -> list[TorchTensor]:
    """A model's tensors as ``model/<name>``.

    Args:
        model: the model.
        equal: names of buffers that are equal on all ranks.
        own: this rank's part of partitioned parameters.
    """
    slices, held = (own.places, own.held) if own else ({}, {})
    trained = {plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: list[TorchTensor] = []
    for name, tensor, placement in module_tensors(model):
        placed = Placement.REPLICATED if name in equal else placement
        value = held[name].data if name in held else tensor
        found += tensors_of(f"model/{name}", value, slices.get(name), placed, name in trained)
    return found


def other_names(model: Module) -> dict[str, str]:
    """Names in ``state_dict`` that differ from those of the saved tensors, as of tied weights, with the saved name; and
    saved names that ``state_dict`` lacks because it has others for them, with an empty text."""

    def place(tensor: torch.Tensor) -> int:
        return tensor.data_ptr() or id(tensor)  # without values there is no memory

    first = {place(tensor): plain_name(name) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    held = {
        plain_name(name): first.get(place(tensor), plain_name(name))
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)  # skip extra state
    }
    others = {name: saved for name, saved in held.items() if name != saved}
    return others | {saved: "" for saved in others.values() if saved not in held}


def random_tensors(device: torch.device) -> list[ArrayTensor]:
    """This rank's random states."""
    arrays = host_random_state() | {"rng/torch": torch.get_rng_state().numpy()}
    if device.type != "cpu":
        arrays[f"rng/torch_{device.type}"] = accelerator.random_state(device).numpy()
    return [ArrayTensor(name, array, Placement.RANK) for name, array in arrays.items()]


def load_random(device: torch.device, arrays: Mapping[str, Array]) -> None:
    """Restores saved random states; a new rank without any keeps its own."""
    restore_host_random_state(arrays)
    if "rng/torch" in arrays:
        torch.set_rng_state(torch.from_numpy(np.array(arrays["rng/torch"], np.uint8)))
    if (name := f"rng/torch_{device.type}") in arrays:
        accelerator.set_random_state(device, torch.from_numpy(np.array(arrays[name], np.uint8)))


@contextmanager
def kept_random_state(device: torch.device = CPU) -> Iterator[None]:
    """Restores this process's random states, and a GPU's, after the body."""
    before = {tensor.name: np.array(tensor.value) for tensor in random_tensors(device)}
    try:
        yield
    finally:
        load_random(device, before)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Returns a hexadecimal hash of the values in order: SHA-256, on a GPU of fingerprints that are computed there."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        tensors = [torch.stack([fingerprint(tensor) for tensor in tensors])]
    return digest_of(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors)


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes."""
CHUNK = 1 << 22
"""Elements of which a fingerprint makes 64-bit integers at a time."""
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""An odd number whose multiples are spread evenly (Knuth, TAOCP 3, section 6.4), as a signed one."""


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum of the elements' bits, each times an odd factor that depends on its place, on the tensor's device.

    A change of one element always changes it: multiplication by an odd number is a bijection modulo 2^64.
    """
    words = tensor.detach().contiguous().view(-1).view(WORDS[min(tensor.dtype.itemsize, 8)])
    factors = torch.arange(min(CHUNK, len(words)), device=tensor.device).mul_(GOLDEN).bitwise_or_(1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in words.split(CHUNK):
        total = total * GOLDEN + (part.long() * factors[: len(part)]).sum()
    return total


def read_weights(file: IO[bytes], path: Path, known: Container[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Reads a file with a ``state_dict``, or a mapping that holds one, without running code from it.

    Only tensors are read (``weights_only=True``).

    Args:
        file: the open file.
        path: its path, for messages.
        known: dtypes that the caller supports.

    Returns:
        Arrays (bfloat16 as uint16) and dtypes, by name.

    Raises:
        UserError: it is not such a file, or holds more than tensors, lists, mappings and numbers.
        OSError: it cannot be read.
    """
    content = loaded(file, path)
    state = state_dict_in(content, path)
    arrays, dtypes = {}, {}
    for name, value in state.items():
        if str(name).endswith("_extra_state"):  # state, but not a weight
            continue
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = f"a {value.layout}" if isinstance(value, torch.Tensor) else kind_of(value)
            raise UserError(f"{name} of {path} is {kind}, not a dense tensor", "save model.state_dict() alone")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in known:
            raise UserError(f"{name} of {path} is {dtype}, which cannot be read", "save weights as 16-bit numbers")
        arrays[str(name)] = items_in(value)
        dtypes[str(name)] = dtype
    return arrays, dtypes


def read_tensor(content: bytes, path: Path) -> Array:
    """Decodes a tensor (bfloat16 as uint16) that ``torch.save`` wrote, without running code. Raises UserError."""
    value = loaded(io.BytesIO(content), path)
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{path} holds {kind_of(value)} in place of a tensor", "give an intact checkpoint")
    return items_in(value)


def loaded(file: IO[bytes], path: Path) -> Any:
    """What ``torch.save`` wrote, if it holds only tensors, lists, mappings and numbers. Raises UserError, OSError."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # UnpicklingError, RuntimeError, EOFError, KeyError, ...
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path} is not a PyTorch file that holds only weights: {first[:200]}",
            "save it with torch.save(model.state_dict(), path): objects are not read, since that runs their code",
        ) from error


def items_in(tensor: torch.Tensor) -> Array:
    """A dense tensor's values; bfloat16 as uint16."""
    host = tensor.detach().contiguous()
    return host.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else host.numpy()


def state_dict_in(content: Any, path: Path) -> Mapping[str, Any]:
    """Finds the model's state in a file's content. Raises UserError."""
    inner = next((content[key] for key in INNER if key in content), content) if isinstance(content, Mapping) else None
    if not isinstance(inner, Mapping) or not any(isinstance(value, torch.Tensor) for value in inner.values()):
        raise UserError(
            f"{path} holds no state_dict", f"save model.state_dict(), by itself or under one of {', '.join(INNER)}"
        )
    return inner


def write_weights(state: Mapping[str, Any], path: Path) -> None:
    """Writes tensors for ``torch.load(path, weights_only=True)``."""
    with open(path, "wb") as file:  # otherwise torch would hide an error of the disk
        torch.save(dict(state), file)


def tensor_over(array: Array, dtype: str) -> torch.Tensor:
    """Wraps an array of this dtype as a tensor over the same memory; bfloat16 is stored as uint16."""
    return host_tensor(array, torch.bfloat16 if dtype == "bfloat16" else torch.float32)

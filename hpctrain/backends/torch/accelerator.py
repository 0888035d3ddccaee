"""The device other than the CPU, of any vendor: the only module that calls the API of devices.

PyTorch calls NVIDIA's devices ``cuda``, AMD's too (its ROCm builds), and Intel's ``xpu``; ``torch.cuda`` and
``torch.xpu`` have the same functions. Devices of other kinds, such as Apple's, are not used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from hpctrain.errors import UserError
from hpctrain.system.gpus import Gpu, keep_own_instance, usable_gpus

KINDS = {"cuda": "NVIDIA", "xpu": "Intel"}
"""Types of devices that are used, with the vendor that their name is about."""


def built_for() -> torch.device | None:
    """The type of devices that this PyTorch is built for; None for CPUs."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # PyTorch 2.6, if the machine has none
        return torch.device("cuda") if torch.version.cuda or torch.version.hip else None


def available() -> list[torch.device]:
    """The devices that this PyTorch can use."""
    kind = built_for()
    known = kind is not None and kind.type in KINDS
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())] if known else []  # type: ignore[union-attr]


def vendor() -> str:
    """For whose devices this PyTorch was built: NVIDIA, AMD or Intel; empty for CPUs."""
    kind = built_for()
    if torch.version.hip:
        return "AMD"
    return "" if kind is None else KINDS.get(kind.type, "")


def require_usable(gpus: Sequence[Gpu]) -> None:
    """Raises UserError if a machine has GPUs, and this PyTorch cannot use them: training on its CPUs would be slow.

    Args:
        gpus: the GPUs that this process may use, according to the kernel.
    """
    others = sorted({gpu.vendor for gpu in gpus})
    if not others:
        return
    own = vendor()
    reason = f"is built for {own or 'CPUs'}" if own not in others else "finds none"
    driver = "; the driver may be older than PyTorch's CUDA or ROCm: see hpctrain doctor" if own in others else ""
    raise UserError(
        f"the machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)} of {' and '.join(others)}, and PyTorch "
        f"{torch.__version__} {reason}",
        f"install PyTorch for them (pytorch.org/get-started){driver}; to train on CPUs: export {HIDE[others[0]]}=",
    )


HIDE = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "ROCR_VISIBLE_DEVICES", "Intel": "ZE_AFFINITY_MASK"}
"""Environment variable that hides a vendor's GPUs if its first word names none."""


def are_hidden(vendor: str) -> bool:
    """Whether the environment hides a vendor's GPUs: by nothing, ``-1``, or ``NoDevFiles``, as Slurm does."""
    named = os.environ.get(HIDE[vendor])
    return named is not None and not re.match(r"\s*(\d|GPU-|MIG-)", named)


def pick(local_rank: int) -> torch.device:
    """Picks this rank's device, round-robin, and makes it this thread's current one; the CPU if there is none.

    Raises UserError if there are GPUs that this PyTorch cannot use.
    """
    keep_own_instance(local_rank)
    devices = available()
    if not devices:
        require_usable([gpu for gpu in usable_gpus() if not are_hidden(gpu.vendor)])
        return torch.device("cpu")
    device = devices[local_rank % len(devices)]
    select(device)
    return device


def api(device: torch.device) -> Any:
    """``torch.cuda`` or ``torch.xpu``."""
    return torch.get_device_module(device)


def select(device: torch.device) -> None:
    """Makes a device this thread's current one; a thread's first call would otherwise open the first one."""
    api(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything; at once for the CPU."""
    if device.type != "cpu":
        api(device).synchronize(device)


def event(device: torch.device, timed: bool = False) -> Any:
    """Makes an event; ``record`` records it on the current stream."""
    return api(device).Event(enable_timing=timed)


def reaching_here(device: torch.device) -> Callable[[], object]:
    """A function that waits until the device has reached this point of the current stream."""
    if device.type == "cpu":
        return lambda: None
    here = event(device)
    here.record()
    wait: Callable[[], object] = here.synchronize
    return wait


class SideStream:
    """A stream besides the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = api(device).Stream(device)

    def after_current(self) -> AbstractContextManager[None]:
        """Context whose operations run on this stream, once the device has reached this point of the current one."""
        self.stream.wait_stream(api(self.device).current_stream(self.device))
        return self.here()

    def here(self) -> AbstractContextManager[None]:
        """Context whose operations run on this stream."""
        context: AbstractContextManager[None] = api(self.device).stream(self.stream)
        return context


def hand_over(device: torch.device, tensors: Iterable[Tensor], done: Any) -> None:
    """Lets the current stream use tensors that were made on another one, after an event of that one."""
    current = api(device).current_stream(device)
    current.wait_event(done)
    for tensor in tensors:
        tensor.record_stream(current)  # otherwise their memory could be given away as soon as they are freed


def pin(staging: Tensor, device: torch.device) -> None:
    """Page-locks memory that torch did not allocate, so that copies run at full speed and asynchronously.

    Intel's runtime cannot; copies from and to its devices are then as correct, but slower.
    """
    if device.type == "cuda":
        runtime = api(device).cudart()
        code = int(runtime.cudaHostRegister(staging.data_ptr(), staging.numel() * staging.element_size(), 0))
        if code:
            with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel would raise it
                torch.zeros(1, device=device).add_(1)
        api(device).check_error(code)


def unpin(address: int, device: torch.device) -> None:
    """Undoes ``pin`` of the memory at this address."""
    if device.type == "cuda":
        api(device).cudart().cudaHostUnregister(address)


def generators(device: torch.device) -> list[torch.Generator]:
    """Torch's default generators: the host's, and the device's if it is not the CPU."""
    own = [] if device.type == "cpu" else [api(device).default_generators[device.index or 0]]
    return [torch.default_generator, *own]


def random_state(device: torch.device) -> Tensor:
    """State of the device's generator: uint8, on the host."""
    state: Tensor = api(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Sets the state of the device's generator."""
    api(device).set_rng_state(state, device)


def identity(device: torch.device) -> str:
    """What distinguishes a device from others of its host, as for NCCL: its PCI address, which instances of one GPU
    (MIG) share and the two dies of an MI250X do not. By UUID, or index, if this PyTorch does not know it."""
    known = api(device).get_device_properties(device)
    return pci_address(device) or str(getattr(known, "uuid", f"{device.type} {device.index or 0}"))


def name(device: torch.device) -> str:
    """The device's name, as its driver gives it."""
    return str(api(device).get_device_name(device))


def pci_address(device: torch.device) -> str:
    """Address of a device as the kernel writes it: ``0000:3b:00.0``; empty if this PyTorch does not know it."""
    known = api(device).get_device_properties(device)
    parts: list[Any] = [getattr(known, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return "" if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that tensors used at most so far, and that PyTorch holds."""
    return api(device).max_memory_allocated(device), api(device).memory_reserved(device)


def nccl_version(device: torch.device) -> str:
    """The version of NCCL, or of RCCL on AMD's devices."""
    return ".".join(map(str, api(device).nccl.version()))


def has_tf32(device: torch.device) -> bool:
    """Whether matrix products in float32 may use tensor cores, at TF32's precision."""
    return device.type == "cuda" and not torch.version.hip and api(device).get_device_capability(device) >= (8, 0)


def activities() -> list[ProfilerActivity]:
    """What torch's profiler can record here."""
    devices = {device.type.upper() for device in available()}
    return [ProfilerActivity.CPU, *(getattr(ProfilerActivity, kind) for kind in devices)]


def nvtx(name: str) -> AbstractContextManager[None]:
    """Context that is a range of NVTX (of roctx on AMD); nothing without such devices."""
    has_ranges = any(device.type == "cuda" for device in available())
    return torch.cuda.nvtx.range(name) if has_ranges else nullcontext()


def save_memory_when_full(device: torch.device, path: Path) -> None:
    """Has PyTorch write its memory blocks to a file when a device is out of memory; for pytorch.org/memory_viz."""
    if device.type == "cuda":

        def full(index: int, wanted: int, total: int, free: int) -> None:
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(path))

        torch._C._cuda_attach_out_of_memory_observer(full)  # type: ignore[attr-defined]


def facts() -> dict[str, Any]:
    """The version of CUDA, ROCm or oneAPI that this PyTorch was built for, and the names of its devices."""
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    names = [name(device) for device in available()]
    return {"platform": " ".join(f"{kind} {number}" for kind, number in built.items() if number), "gpus": names}

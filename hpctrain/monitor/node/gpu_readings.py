"""This job's GPUs as the vendors' management libraries see them, NVIDIA's NVML or AMD's SMI: the only module that calls
them. Intel's GPUs are not read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpctrain.monitor.shared import place_of
from hpctrain.system.quantities import numbers_in

REASONS = {
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Reasons for lower clocks that are reported (nvmlClocksEventReasons); the power limit is a normal one."""
UNCORRECTABLE = -1
"""In place of an Xid: AMD's count of uncorrectable memory errors has grown."""
BROKEN = {
    UNCORRECTABLE: "uncorrectable memory error",
    48: "double-bit memory error",
    62: "internal controller halted",
    64: "memory row cannot be remapped",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
}
"""Xids that are the hardware's, or need its reset, and not a program's (docs.nvidia.com/deploy/xid-errors)."""
XID, DOUBLE_BIT = 8, 2
"""Types of NVML's events."""
GPU_IS_LOST = 15
"""NVML's error once a GPU has fallen off the bus, with or without an event."""


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one time; None for what it does not report."""

    index: int
    """The library's number."""
    place: int
    """See ``monitor.shared.place_of``."""
    busy: float | None = None
    """Fraction of the last second in which a kernel ran."""
    watts: float | None = None
    joules: float | None = None
    """Energy since the driver was loaded."""
    mhz: float | None = None
    most_mhz: float | None = None
    celsius: float | None = None
    slowed: tuple[str, ...] = ()
    """Why its clocks are lowered, in words."""
    xids: tuple[int, ...] = ()
    """Errors since the last reading, or UNCORRECTABLE."""

    @property
    def broken(self) -> str:
        """What is wrong with the hardware, in words; empty if nothing is known to be."""
        return next((f"GPU {self.index}: {named(xid)}" for xid in self.xids if xid in BROKEN), "")


def remarks(gpus: Sequence[GpuReading]) -> Iterator[str]:
    """What stands out, in words."""
    for gpu in gpus:
        if gpu.slowed:
            clocks = f" runs at {gpu.mhz:.0f} of {gpu.most_mhz:.0f} MHz" if gpu.mhz and gpu.most_mhz else ""
            yield f"GPU {gpu.index}{clocks or ' is slowed down'}: {', '.join(gpu.slowed)}"
        yield from (f"GPU {gpu.index}: {named(xid)}" for xid in gpu.xids)


def named(xid: int) -> str:
    """An error in words."""
    return BROKEN.get(xid, "error") + (f" (Xid {xid})" if xid >= 0 else "")


def own_gpus(count: int, environment: Mapping[str, str]) -> list[int]:
    """NVML indices of this job's GPUs among ``count``, as named by Slurm if it does not hide those of other jobs.

    If it hides them, indices start at 0 and the names do not apply. The step's variable comes first, because the job's
    names the GPUs of the node on which the script runs.
    """
    named = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS") or ""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", named):
        return list(range(count))
    ours = set(numbers_in(named))
    return [index for index in range(count) if index in ours or len(ours) >= count]


class Nvml:
    """Reads this job's GPUs; none without nvidia-ml-py, driver or GPU."""

    def __init__(self) -> None:
        self.nvml: Any = None
        self.gpus: list[tuple[int, Any, int, Any]] = []
        """Index, handle, place, and NVML's set of events."""
        self.lost: set[int] = set()
        """Indices of GPUs that have fallen off the bus."""
        try:
            import pynvml  # type: ignore[import-not-found]

            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except Exception:  # library, driver or device missing
            return
        self.nvml = pynvml
        for index in own_gpus(count, os.environ):
            with suppress(pynvml.NVMLError):  # not readable
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                events = None
                bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
                with suppress(pynvml.NVMLError):  # a vGPU has no events
                    events = pynvml.nvmlEventSetCreate()
                    pynvml.nvmlDeviceRegisterEvents(handle, XID | DOUBLE_BIT, events)
                place = place_of(bus_id.decode() if isinstance(bus_id, bytes) else bus_id)
                self.gpus.append((index, handle, place, events))

    def read(self) -> tuple[GpuReading, ...]:
        """Reads all GPUs, in some milliseconds."""
        return tuple(self._read(*gpu) for gpu in self.gpus)

    def _read(self, index: int, handle: Any, place: int, events: Any) -> GpuReading:
        def number(name: str, *given: int, scale: float = 1.0) -> float | None:
            with suppress(self.nvml.NVMLError, AttributeError):  # of this driver, or of this pynvml
                return float(getattr(self.nvml, f"nvmlDeviceGet{name}")(handle, *given)) * scale
            return None

        # Drivers before 535 know the second name only, and CUDA 14 will not know it any more.
        known = (number(f"CurrentClocks{name}Reasons") for name in ("Event", "Throttle"))
        reasons = int(next((one for one in known if one is not None), 0))
        busy = None
        with suppress(self.nvml.NVMLError):
            busy = self.nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        clock = self.nvml.NVML_CLOCK_SM
        return GpuReading(
            index=index,
            place=place,
            busy=busy,
            watts=number("PowerUsage", scale=1e-3),
            joules=number("TotalEnergyConsumption", scale=1e-3),
            mhz=number("ClockInfo", clock),
            most_mhz=number("MaxClockInfo", clock),
            celsius=number("Temperature", self.nvml.NVML_TEMPERATURE_GPU),
            slowed=tuple(word for bit, word in REASONS.items() if reasons & bit),
            xids=tuple(self._errors(index, events)) if events is not None else (),
        )

    def _errors(self, index: int, events: Any) -> Iterator[int]:
        """Takes the errors since the last call; a double-bit error has Xid 48, too, and a lost GPU 79."""
        try:
            while True:
                event = self.nvml.nvmlEventSetWait_v2(events, 0)
                yield 48 if event.eventType == DOUBLE_BIT else int(event.eventData)
        except self.nvml.NVMLError as error:  # mostly a timeout: there are no more
            if getattr(error, "value", None) == GPU_IS_LOST and index not in self.lost:
                self.lost.add(index)
                yield 79


class AmdSmi:
    """Reads this job's GPUs by ROCm's Python package; none without the package, driver or GPU."""

    def __init__(self) -> None:
        self.gpus: list[tuple[int, Any, int]] = []
        """Index, handle and place."""
        self.uncorrectable: dict[int, float] = {}
        """Memory errors at the last reading, by index."""
        try:
            import amdsmi  # type: ignore[import-not-found]

            amdsmi.amdsmi_init()
            handles = amdsmi.amdsmi_get_processor_handles()
        except Exception:  # library, driver or device missing
            return
        self.smi = amdsmi
        for index in own_gpus(len(handles), os.environ):
            with suppress(amdsmi.AmdSmiException):  # not readable
                self.gpus.append((index, handles[index], place_of(amdsmi.amdsmi_get_gpu_device_bdf(handles[index]))))
        self.read()  # errors of before the run are not this run's

    def read(self) -> tuple[GpuReading, ...]:
        """Reads all GPUs."""
        return tuple(self._read(*gpu) for gpu in self.gpus)

    def _read(self, index: int, handle: Any, place: int) -> GpuReading:
        of = partial(self._numbers, handle)
        busy = of("gpu_activity", "gfx_activity")
        ticks = of("energy_count", "energy_accumulator", "power")
        microjoules = of("energy_count", "counter_resolution")
        errors = self._memory_errors(handle)
        before = self.uncorrectable.get(index, math.inf)
        self.uncorrectable[index] = before if errors is None else errors
        return GpuReading(
            index=index,
            place=place,
            busy=None if busy is None else busy / 100,
            watts=of("power_info", "current_socket_power", "average_socket_power"),
            joules=None if ticks is None or microjoules is None else ticks * microjoules * 1e-6,
            mhz=of("clock_info", "clk", "cur_clk", given=[self.smi.AmdSmiClkType.GFX]),
            most_mhz=of("clock_info", "max_clk", given=[self.smi.AmdSmiClkType.GFX]),
            celsius=of(
                "temp_metric", given=[self.smi.AmdSmiTemperatureType.HOTSPOT, self.smi.AmdSmiTemperatureMetric.CURRENT]
            ),
            xids=(UNCORRECTABLE,) if self.uncorrectable[index] > before else (),
        )

    def _memory_errors(self, handle: Any) -> float | None:
        return self._numbers(handle, "gpu_total_ecc_count", "uncorrectable_count")

    def _numbers(self, handle: Any, name: str, *keys: str, given: Sequence[Any] = ()) -> float | None:
        """The first number among the keys, whose names differ between versions; what is unsupported is ``N/A``."""
        with suppress(self.smi.AmdSmiException):
            found = getattr(self.smi, f"amdsmi_get_{name}")(handle, *given)
            values = [found.get(key) for key in keys] if keys else [found]
            return next((float(value) for value in values if isinstance(value, int | float)), None)
        return None


def open_gpus() -> Nvml | AmdSmi:
    """The library that sees GPUs here."""
    nvml = Nvml()
    return nvml if nvml.gpus else AmdSmi()

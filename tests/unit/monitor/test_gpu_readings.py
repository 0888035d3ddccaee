"""GPUs by a made NVML and a made SMI of AMD."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hpctrain.monitor.node.gpu_readings import GpuReading, Nvml, open_gpus, own_gpus, remarks
from hpctrain.monitor.node.node import used
from hpctrain.monitor.shared import GPU_PLACE, HEADER, place_of


class Unreadable(Exception):
    """NVML's error."""


def four_gpus(forbidden: int, errors: list[tuple[int, int]]) -> ModuleType:
    """An NVML of four GPUs, all slowed down by heat, of which one may not be read; events of GPU 3, as type and Xid."""

    def device(index: int) -> int:
        if index == forbidden:
            raise Unreadable("Insufficient Permissions")
        return index

    def wait(events: list[int], timeout_ms: int) -> SimpleNamespace:
        if 3 not in events or not errors:
            raise Unreadable("Timeout")
        kind, xid = errors.pop()
        return SimpleNamespace(eventType=kind, eventData=xid)

    def unsupported(device: int) -> int:
        raise Unreadable("Not Supported")

    nvml = ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=Unreadable,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=device,
        nvmlDeviceGetPciInfo=lambda device: SimpleNamespace(busId=f"00000000:{0x3A + device:02X}:00.0"),
        nvmlEventSetCreate=list,
        nvmlDeviceRegisterEvents=lambda device, kinds, events: events.append(device),
        nvmlEventSetWait_v2=wait,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda device: 32,
        nvmlDeviceGetClockInfo=lambda device, clock: 900,
        nvmlDeviceGetMaxClockInfo=lambda device, clock: 1980,
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=98),
        nvmlDeviceGetPowerUsage=lambda device: 640_000,
        nvmlDeviceGetTotalEnergyConsumption=unsupported,
        nvmlDeviceGetTemperature=lambda device, sensor: 91,
    )
    return nvml


def test_a_gpu_is_read_and_one_that_may_not_be_hides_no_other(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", four_gpus(1, [(8, 79), (2, 0)]))
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1,3")
    nvml = Nvml()
    first, last = nvml.read()
    same = {"busy": 0.98, "watts": 640.0, "joules": None, "mhz": 900.0, "most_mhz": 1980.0, "celsius": 91.0}
    assert first == GpuReading(0, place_of("0000:3a:00.0"), **same, slowed=("heat",))
    assert (last.xids, last.broken) == ((48, 79), "GPU 3: double-bit memory error (Xid 48)")
    assert list(remarks([first, last])) == [
        "GPU 0 runs at 900 of 1980 MHz: heat",
        "GPU 3 runs at 900 of 1980 MHz: heat",
        "GPU 3: double-bit memory error (Xid 48)",
        "GPU 3: fell off the bus (Xid 79)",
    ]
    assert nvml.read()[1].xids == (), "an error is reported once"


@pytest.mark.parametrize(
    ("known", "slowed"),
    [({"EventReasons": 64}, ("heat (hardware)",)), ({"EventReasons": None, "ThrottleReasons": 32}, ("heat",))],
    ids=["CUDA 14", "a driver before 535"],
)
def test_reasons_for_lower_clocks_have_two_names(known, slowed, monkeypatch):
    made = four_gpus(1, [])
    del vars(made)["nvmlDeviceGetCurrentClocksThrottleReasons"]

    def reasons(found):
        if found is None:
            raise Unreadable("Function Not Found")
        return found

    for name, found in known.items():
        vars(made)[f"nvmlDeviceGetCurrentClocks{name}"] = lambda device, found=found: reasons(found)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    assert {gpu.slowed for gpu in Nvml().read()} == {slowed}


def test_a_gpu_that_no_rank_is_on_is_another_jobs():
    gpus = [GpuReading(index, place_of(f"0000:{index:02x}:00.0"), joules=5.0) for index in (1, 2, 3)]
    heads = np.zeros((2, HEADER))
    assert used(gpus, heads) == gpus, "no rank knows its own"
    heads[1, GPU_PLACE] = gpus[2].place
    assert used(gpus, heads) == gpus[2:]


def test_a_gpu_that_is_gone_is_broken_even_without_an_event(monkeypatch):
    def lost(events, timeout_ms):
        error = Unreadable("GPU is lost")
        error.value = 15 if 2 in events else 10  # type: ignore[attr-defined]
        raise error

    made = four_gpus(1, [])
    vars(made)["nvmlEventSetWait_v2"] = lost
    monkeypatch.setitem(sys.modules, "pynvml", made)
    nvml = Nvml()
    assert [gpu.broken for gpu in nvml.read()] == ["", "GPU 2: fell off the bus (Xid 79)", ""]
    assert [gpu.broken for gpu in nvml.read()] == ["", "", ""], "once"


def test_a_gpu_whose_clock_is_unknown_is_described_too():
    assert list(remarks([GpuReading(0, 0, slowed=("heat",))])) == ["GPU 0 is slowed down: heat"]


def test_without_nvml_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert open_gpus().read() == ()


def test_amds_gpus_are_read_where_there_is_no_nvml(monkeypatch):
    """Keys of ROCm 6.2 and later; MI300s report no average power."""
    wrong = {"uncorrectable_count": 2}

    def unsupported(*given):
        raise Unreadable("AMDSMI_STATUS_NOT_SUPPORTED")

    smi = ModuleType("amdsmi")
    vars(smi).update(
        AmdSmiException=Unreadable,
        AmdSmiClkType=SimpleNamespace(GFX=0),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [10, 11],
        amdsmi_get_gpu_device_bdf=lambda device: f"0000:{device:02x}:00.0",
        amdsmi_get_gpu_activity=lambda device: {"gfx_activity": 98, "umc_activity": "N/A"},
        amdsmi_get_power_info=lambda device: {"current_socket_power": 640, "average_socket_power": "N/A"},
        amdsmi_get_energy_count=lambda device: {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        amdsmi_get_clock_info=lambda device, kind: {"clk": 900, "max_clk": 2100},
        amdsmi_get_temp_metric=unsupported,
        amdsmi_get_gpu_total_ecc_count=lambda device: wrong if device == 11 else unsupported(device),
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    gpus = open_gpus()
    numbers = {"busy": 0.98, "watts": 640.0, "joules": pytest.approx(30.6), "mhz": 900.0, "most_mhz": 2100.0}
    first, last = gpus.read()
    assert first == GpuReading(0, place_of("0000:0a:00.0"), **numbers)
    assert not last.broken, "errors of before the run"
    wrong["uncorrectable_count"] = 3
    assert [gpu.broken for gpu in gpus.read()] == ["", "GPU 1: uncorrectable memory error"]
    assert [gpu.broken for gpu in gpus.read()] == ["", ""], "once"


def test_a_programs_own_error_is_named_and_breaks_no_gpu():
    fault = GpuReading(0, 0, xids=(31,))
    assert (list(remarks([fault])), fault.broken) == (["GPU 0: error (Xid 31)"], "")


def test_addresses_of_any_width_are_one_place():
    assert place_of("00000000:3B:00.0") == place_of("0000:3b:00.0") != place_of("0001:3b:00.0")
    assert place_of("") == 0


@pytest.mark.parametrize(
    ("environment", "looked_at"),
    [
        ({}, [0, 1, 2, 3]),
        ({"SLURM_STEP_GPUS": "1,3"}, [1, 3]),
        ({"SLURM_STEP_GPUS": "0,2-3"}, [0, 2, 3]),
        ({"SLURM_JOB_GPUS": "2"}, [2]),
        ({"SLURM_STEP_GPUS": "1", "SLURM_JOB_GPUS": "2"}, [1]),
        ({"SLURM_STEP_GPUS": "4,5,6,7"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_GPUS": "GPU-1f2e"}, [0, 1, 2, 3]),
    ],
    ids=["no Slurm", "indices", "a span", "of the job", "of the step first", "hidden by cgroups", "no indices"],
)
def test_gpus_of_other_jobs_are_not_looked_at(environment, looked_at):
    assert own_gpus(4, environment) == looked_at

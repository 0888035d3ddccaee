"""What is measured and seen of devices: links, matrix products, memory, NVML, traces, and a hang's collective."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing, suppress

from benchmarks.gpu_proof.machine import device_of
from benchmarks.gpu_proof.rows import Figures, Setting, Skipped, require

BUSY_S = 2.0
LEAVE_S = 10.0
"""Longest time in which a rank that fails leaves its process group."""


def links(setting: Setting) -> Figures:
    """Measures as the preflight does, and reads NCCL's network from its own output."""
    from hpctrain.backends.torch.measure import measure
    from hpctrain.comm.world import connect

    speeds = measure(connect())
    require(len(speeds.within) == 1 and len(speeds.devices) == setting.row.ranks, f"not measured: {speeds}")
    require(speeds.network == ("Socket" if setting.on_gpu else ""), f"NCCL's network was read as {speeds.network!r}")
    return {"gb_per_s": next(iter(speeds.within.values())), "tflops": min(found for *_, found in speeds.devices)}


def seen(setting: Setting) -> Figures:
    """Checks memory, name and address of the device, NVML's reading of it, ranges in a trace, and a full memory."""
    if not setting.on_gpu:
        raise Skipped("needs a GPU")
    import torch

    from hpctrain.backends.torch import accelerator
    from hpctrain.backends.torch.performance import TorchProfiler
    from hpctrain.monitor.node.gpu_readings import Nvml
    from hpctrain.monitor.shared import place_of
    from hpctrain.system.fabric import cores_near
    from hpctrain.train.data_sheets import sheet_per_s

    device, pci = device_of(on_gpu=True), accelerator.pci_address(device_of(on_gpu=True))
    held = torch.ones(2**28, device=device)  # 1 GiB
    peak, reserved = accelerator.memory(device)
    require(peak >= 2**30 and reserved >= 2**30, f"peak {peak} and reserved {reserved} bytes of 1 GiB")
    nvml = Nvml()
    before = {gpu.place: gpu for gpu in nvml.read()}
    profiler, until = TorchProfiler(), time.monotonic() + BUSY_S
    profiler.start(setting.folder / "trace")
    profiler.show("forward")
    square = held[: 2**26].view(8192, 8192)
    while time.monotonic() < until:
        torch.mm(square, square)
        torch.cuda.synchronize()
    profiler.show("")
    profiler.stop()
    trace = json.loads((setting.folder / "trace.pt.trace.json").read_text())["traceEvents"]
    require(any(event.get("name") == "forward" for event in trace), "the trace has no range of the phase")
    figures: Figures = {"pci": pci, "cores_near": len(cores_near(pci)), "peak_bytes": peak}
    if before:
        now = {gpu.place: gpu for gpu in nvml.read()}
        require(place_of(pci) in now, f"{pci} is not among NVML's {sorted(now)}")
        gpu, earlier = now[place_of(pci)], before[place_of(pci)]
        joules = gpu.joules - earlier.joules if gpu.joules and earlier.joules else None
        figures |= {"watts": gpu.watts, "busy": gpu.busy, "mhz": gpu.mhz, "joules": joules, "xids": len(gpu.xids)}
    accelerator.save_memory_when_full(device, setting.folder / "monitor" / "memory.pickle")
    with suppress(torch.OutOfMemoryError):
        torch.ones(2**45, device=device)
    require((setting.folder / "monitor" / "memory.pickle").stat().st_size > 0, "no snapshot of a full memory")
    return figures | {"sheet_tflops": sheet_per_s(accelerator.name(device), "bf16") / 1e12}


def hang(setting: Setting) -> Figures:
    """Lets rank 1 come late to an allreduce, which rank 0's file must name."""
    import torch

    from hpctrain.backends.torch.collective_watch import CollectiveWatch, record
    from hpctrain.backends.torch.process_groups import peers_of
    from hpctrain.comm.world import connect
    from hpctrain.monitor.chief.collectives import read, who_is_missing
    from hpctrain.monitor.ring_clock import RingClock
    from hpctrain.run.folder import RunDir
    from hpctrain.train.clock import Phase

    world, run, clock = connect(), RunDir(setting.folder), RingClock()
    run.monitor.mkdir(exist_ok=True)
    record(run.monitor)
    device = device_of(setting.on_gpu)
    values = torch.ones(2**20, device=device)
    with closing(peers_of(world.data, device)) as peers:
        peers.sum(values, "begin")()
        clock.mark(Phase.BACKWARD)
        with closing(CollectiveWatch(clock, run, run.collectives(1, world.rank), 1.0)):
            if world.rank == 1:
                time.sleep(4)
            wait = peers.sum(values, "hang")
            wait()
            float(values[0])  # waits for the device
    found = who_is_missing(read(run, 1, range(world.size)))
    require("rank 1 did not join all_reduce" in found, f"the missing rank is not named: {found!r}")
    return {"sentence": found, "dumps": len(os.listdir(run.monitor))}


def fails(setting: Setting) -> Figures:
    """Lets both ranks fail, while rank 0's GPU waits for a sum that rank 1 never joins."""
    if not setting.on_gpu:
        raise Skipped("needs a GPU")
    import torch

    from hpctrain.backends.torch.process_groups import peers_of
    from hpctrain.comm.world import connect

    world, device = connect(), device_of(setting.on_gpu)
    values, began = torch.ones(2**20, device=device), 0.0
    with suppress(ArithmeticError), closing(peers_of(world.data, device)) as peers:
        peers.sum(values, "begin")()
        torch.cuda.synchronize()
        if world.rank == 0:
            peers.sum(values, "wait for rank 1")()
        began = time.monotonic()
        raise ArithmeticError
    seconds = time.monotonic() - began
    require(seconds < LEAVE_S, f"rank {world.rank} left its process group after {seconds:.0f} s")
    return {"left_after_s": seconds}

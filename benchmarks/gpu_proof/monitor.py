"""The monitor's phase clock."""

from __future__ import annotations

import time

from benchmarks.gpu_proof.machine import device_of, finish
from benchmarks.gpu_proof.rows import Figures, Setting, require
from hpctrain import MonitorClock
from hpctrain.train.clock import Phase

CYCLES_PER_MS = 1_500_000
STEPS = 8


def row(setting: Setting) -> Figures:
    """Checks that a backward phase four times as long as forward is measured so, although the host only queues work."""
    clock = MonitorClock()
    if setting.on_gpu:
        from hpctrain.backends.torch.device import follow_device

        follow_device(clock, device_of(on_gpu=True))
    finish(setting.on_gpu)
    clock.mark(Phase.DATA)  # everything before
    began = time.perf_counter()
    asked = [0.0, 0.0]
    for _ in range(STEPS):
        asked[0] += work(10, setting.on_gpu)
        clock.mark(Phase.FORWARD)
        asked[1] += work(40, setting.on_gpu)
        clock.mark(Phase.BACKWARD)
        clock.end_step(32)
    queued = time.perf_counter() - began
    finish(setting.on_gpu)
    worked = time.perf_counter() - began
    for _ in range(2):  # rows may come late
        finish(setting.on_gpu)
        clock.end_step(32)
    forward, backward = (float(clock.totals[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD))
    ratio, wanted = backward / forward, asked[1] / asked[0]
    require(abs(ratio - wanted) < 0.1 * wanted, f"backward took {ratio:.2f} times forward, not {wanted:.2f}")
    share = (forward + backward) / worked
    require(0.8 < share < 1.2, f"phases make up {share:.0%} of the time")
    if setting.on_gpu:
        require(queued < 0.5 * worked, "marks wait for the device")
    return {"backward_to_forward": ratio, "share_of_time": share, "host_share": queued / worked}


def work(milliseconds: float, on_gpu: bool) -> float:
    """Keeps the device busy, or sleeps without a GPU; returns the milliseconds taken."""
    if on_gpu:
        import torch

        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))
        return milliseconds
    began = time.perf_counter()
    time.sleep(milliseconds / 1000)
    return 1000 * (time.perf_counter() - began)

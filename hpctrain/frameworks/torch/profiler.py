"""torch.profiler, for traces that chrome://tracing, Perfetto and TensorBoard show."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class TorchProfiler:
    """See train.profile.Profiler. Writes ``<target>.pt.trace.json``."""

    def __init__(self) -> None:
        self.running: profile | None = None
        self.target = Path()

    def start(self, target: Path) -> None:
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.target = target
        self.running = profile(activities=[ProfilerActivity.CPU, *gpu])
        self.running.start()

    def stop(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.stop()
            running.export_chrome_trace(f"{self.target}.pt.trace.json")

    def abandon(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.stop()

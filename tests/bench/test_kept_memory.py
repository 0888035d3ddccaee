"""Speed-up by keeping freed memory, for activations of 16 MiB or more: 3-D convolutions, in alternating processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

ROUNDS = 3
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
"""What docs/performance.md says to put into launch.env."""
STEPS = """
import json, resource, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
inner = (nn.Conv3d(1, 16, 3, padding=1), nn.GELU(), nn.Conv3d(16, 16, 3, padding=1), nn.GELU())
model = nn.Sequential(*inner, nn.Conv3d(16, 1, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(2, 1, 64, 64, 64), torch.randn(2, 1, 64, 64, 64)
times = []
for _ in range(8):
    began = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
print(json.dumps({"steps_s": times[2:], "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
"""


def test_steps_that_keep_their_memory_are_faster():
    seconds: dict[str, list[float]] = {"as it is": [], "kept": []}
    peaks = {}
    for _ in range(ROUNDS):
        for way, steps in seconds.items():
            env = {**os.environ, **(KEPT if way == "kept" else {})}
            done = subprocess.run([sys.executable, "-c", STEPS], env=env, capture_output=True, check=True)
            told = json.loads(done.stdout)
            steps += told["steps_s"]
            peaks[way] = told["peak_mib"]
    plain, kept = map(statistics.median, seconds.values())
    print(f"as it is {plain * 1e3:.0f} ms, kept {kept * 1e3:.0f} ms: {plain / kept:.2f} times as fast; MiB: {peaks}")
    assert kept < plain

"""The device: facts, peak speed, and synchronization."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from typing import Any

from hpctrain import __version__
from hpctrain.system import python
from hpctrain.system.cgroups import usable_cores
from hpctrain.train.data_sheets import sheet_per_s

ASK = """
import json, torch
gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
print(json.dumps([torch.__version__, torch.version.cuda, nccl, gpus]))
"""


def facts() -> dict[str, Any]:
    """Facts about this machine; torch is queried in a separate process, so that no GPU context stays open."""
    import json

    done = subprocess.run(python.code(ASK), capture_output=True, text=True, timeout=120, check=True)
    version, cuda, nccl, gpus = json.loads(done.stdout.splitlines()[-1])
    return {
        "device": ", ".join(gpus) or f"a CPU with {usable_cores()} cores, no GPU",
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": version,
        "CUDA": cuda or "none",
        "NCCL": nccl or "none",
        "cores": usable_cores(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "interpreter": sys.executable,
    }


def device_of(on_gpu: bool) -> Any:
    """The first GPU, or the CPU."""
    import torch

    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def finish(on_gpu: bool) -> None:
    """Waits for the device."""
    import torch

    if on_gpu:
        torch.cuda.synchronize()


def peak_per_s(on_gpu: bool) -> tuple[float, str]:
    """Peak bf16 FLOP/s and its source: the data sheet, or a matrix product on this device."""
    import torch

    if on_gpu:
        peak = sheet_per_s(torch.cuda.get_device_name(), "bf16")
        if peak:
            return peak, "data sheet"
    size = 8192 if on_gpu else 512
    matrix = torch.ones(size, size, device=device_of(on_gpu), dtype=torch.bfloat16)
    fastest = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        matrix @ matrix
        finish(on_gpu)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest, "measured product of matrices"

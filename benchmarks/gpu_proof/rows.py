"""The table of rows: trials, their numbers of ranks and time limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "benchmarks.gpu_proof"
HOROVOD = "horovod-0.28.1.tar.gz"
"""Horovod's sources."""
WHEELS = "HPCTRAIN_PROOF_WHEELS"
"""Environment variable: the folder of --wheels."""
PLANS = ("replicated", "tensor", "pipeline", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Row:
    """One trial."""

    name: str
    what: str
    """What it shows, for people."""
    function: str
    """file:function; called with a Setting, returns figures."""
    ranks: int = 1
    timeout_s: float = 90
    alone: bool = False
    """Whether it measures times, so that nothing else may run at the same time."""


@dataclass(frozen=True)
class Setting:
    """Argument of a row's function."""

    row: Row
    folder: Path
    """Folder of this row."""
    rank: int
    on_gpu: bool

    @property
    def word(self) -> str:
        """Middle part of the row's name: ``tensor`` in ``plan-tensor-2``."""
        return self.row.name.split("-")[1]


class Wrong(Exception):
    """A number is wrong."""


class Skipped(Exception):
    """The machine lacks what the row needs."""


def require(holds: bool, otherwise: str) -> None:
    """Raises Wrong unless ``holds``."""
    if not holds:
        raise Wrong(otherwise)


Figures = dict[str, Any]


def _rows() -> list[Row]:
    listed = [
        Row(f"train-{precision}", f"loss curve in {precision} against a bare loop on the CPU in fp32", "precision:row")
        for precision in ("fp32", "bf16", "fp16")
    ]
    for ranks in (2, 4):
        what = f"sums, gathers and messages of {ranks} ranks, each value checked"
        listed.append(Row(f"exchange-device-{ranks}", what, "exchange:row", ranks))
    for ranks in (2, 4):
        for plan in (*PLANS, *(("grid",) if ranks == 4 else ())):
            what = f"{plan} on {ranks} ranks: losses and weights as of one process, resume bit for bit"
            listed.append(Row(f"plan-{plan}-{ranks}", what, "plans:row", ranks))
    return [
        *listed,
        Row("nccl-waits-2", "how often the host waits for the device in an update, with clipping and in local SGD, too",
            "overlap:waits", 2),
        Row("nccl-overlap-2", "the first message is under way before backward's last kernel", "overlap:overlap", 2),
        Row("devices-hang-2", "the flight recorder names the rank that is late for a collective", "devices:hang", 2),
        Row("devices-fail-2", "a rank that fails does not wait for the others to leave NCCL", "devices:fails", 2),
        Row("checkpoint-resume", "interrupted and resumed in bf16 with dropout, bit for bit", "checkpoint:resume"),
        Row("nccl-speed-2", "peak memory and step next to DDP with bucket views and a bare loop, on one GPU",
            "overlap:speed", 2, 180, alone=True),
        Row("speed-gpt", "GPT in bf16 with torch.compile: hpctrain, DDP, bare loop", "speed:gpt", 1, 180, alone=True),
        Row("speed-resnet", "ResNet in bf16 with torch.compile: the same", "speed:resnet", 1, 180, alone=True),
        Row("speed-gpt-eager", "the GPT without torch.compile", "speed:gpt", 1, 120, alone=True),
        Row("speed-resnet-eager", "the ResNet without torch.compile", "speed:resnet", 1, 120, alone=True),
        Row("kernels-ahead", "a fused optimizer launched before the host reads the loss, and after", "kernels:ahead", 1,
            120, alone=True),
        Row("kernels-graphs", "a model bound by launches: eager, compiled, CUDA graphs", "kernels:graphs", 1, 180,
            alone=True),
        Row("kernels-matmul", "GPT in fp32: train.matmul exact and tf32", "kernels:matmul", 1, 120, alone=True),
        Row("kernels-fused", "an optimizer named in the run file, and PyTorch's default", "kernels:fused", alone=True),
        Row("kernels-convolutions", "ResNet with train.cudnn_benchmark", "kernels:convolutions", 1, 120, alone=True),
        Row("published-vit", "NERSC's weather ViT from HDF5, next to 64 samples/s on one A100", "published:vit", 1, 180,
            alone=True),
        Row("published-llama", "Llama 3 8B's shape, 4,096 tokens, next to 10,471 tokens/s on one H200",
            "published:llama", 1, 240, alone=True),
        Row("devices-seen", "memory, NVML, ranges in a trace, snapshot of a full memory", "devices:seen", alone=True),
        Row("devices-links-2", "allreduce and matrix product as in the preflight", "devices:links", 2, alone=True),
        Row("checkpoint-stall", "a checkpoint of device memory: values, stall, copy and write", "checkpoint:stall",
            alone=True),
        Row("feed-pinned", "copies from page-locked and pageable memory to the device", "feed:pinned", alone=True),
        Row("feed-prefetch", "slow samples are read while the device works", "feed:prefetch", alone=True),
        Row("monitor-clock", "phases last as long as the device works; marks do not wait", "monitor:row", alone=True),
        Row("horovod-build", "Horovod built here with NCCL, or the one that is installed", "horovod:build", 1, 240,
            alone=True),
        Row("horovod-train-2", "two ranks that sum by Horovod, as one process", "horovod:train", 2, alone=True),
    ]  # fmt: skip


ROWS = {row.name: row for row in _rows()}

"""The GPUs that this process may use, according to the kernel: of any vendor, without its tools, for any framework."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.system.kernel import read_text

INSTINCT = {90008, 90010, 90402, 90500}
"""Versions of AMD's instruction set on MI100, MI200, MI300 and MI350, as the kernel writes them."""
MAX_SERIES = range(0x0BD0, 0x0BE0)
"""PCI device numbers of Intel's Data Center GPU Max."""
INTEL = 0x8086


@dataclass(frozen=True)
class Gpu:
    """A GPU for computing."""

    vendor: str
    """NVIDIA, AMD or Intel."""
    path: Path
    """The file by which the kernel gives access to it."""


def usable_gpus(root: Path = Path("/")) -> list[Gpu]:
    """The GPUs for computing that this process may open; displays and processors with graphics do not count.

    In a job without GPUs, a node's device files are there but cannot be opened.

    Args:
        root: root of the file system.
    """
    return [gpu for gpu in (*_nvidia(root), *_amd(root), *_intel(root)) if _opens(gpu.path)]


def keep_own_instance(local_rank: int) -> None:
    """Leaves this process one of several instances of GPUs (MIG) that it was given: CUDA would take the first one, on
    every rank (docs.nvidia.com/datacenter/tesla/mig-user-guide). Before the first use of CUDA."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(given) > 1 and all(name.startswith("MIG-") for name in given):
        os.environ["CUDA_VISIBLE_DEVICES"] = given[local_rank % len(given)]


def _nvidia(root: Path) -> Iterator[Gpu]:
    for path in sorted((root / "dev").glob("nvidia[0-9]*")):
        yield Gpu("NVIDIA", path)


def _amd(root: Path) -> Iterator[Gpu]:
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        known = dict(line.split(maxsplit=1) for line in read_text(node).splitlines() if " " in line)
        if int(known.get("gfx_target_version", 0)) in INSTINCT:
            yield Gpu("AMD", root / "dev/dri" / f"renderD{known.get('drm_render_minor', '')}")


def _intel(root: Path) -> Iterator[Gpu]:
    for card in sorted((root / "sys/class/drm").glob("renderD*/device")):
        if _hexadecimal(card / "vendor") == INTEL and _hexadecimal(card / "device") in MAX_SERIES:
            yield Gpu("Intel", root / "dev/dri" / card.parent.name)


def hardware(root: Path = Path("/proc")) -> str:
    """Models of the processor and of NVIDIA's GPUs, on which the last bits of results depend."""
    files = [root / "cpuinfo", *sorted((root / "driver/nvidia/gpus").glob("*/information"))]
    lines = [line for file in files for line in read_text(file).splitlines()]
    return "\n".join(sorted({line for line in lines if line.lower().startswith("model")}))


def _hexadecimal(path: Path) -> int:
    return int(read_text(path).strip() or "0", 16)


def _opens(path: Path) -> bool:
    """Whether this process may use a device file: permissions do not show what a job's cgroup forbids."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False

"""The fast network of this host, and the cores next to its devices, according to the kernel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.system.kernel import read_text
from hpctrain.system.quantities import numbers_in

DRIVERS = {"efa": "EFA", "hfi1": "Omni-Path"}
"""Networks other than InfiniBand whose adapters are listed with it, by their driver."""


def fabric(root: Path = Path("/")) -> str:
    """The fast network that this host has: InfiniBand, Slingshot, EFA or Omni-Path; empty if none is active.

    RoCE is left out: Ethernet adapters offer it whether or not the network is made for it.
    """
    if any((root / "sys/class/cxi").glob("cxi*")):
        return "Slingshot"
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" in read_text(port / "state") and "Ethernet" not in read_text(port / "link_layer"):
            driver = (port.parents[1] / "device" / "driver").resolve().name
            return DRIVERS.get(driver, "InfiniBand")
    return ""


def cores_near(pci: str, root: Path = Path("/")) -> set[int]:
    """Cores of the NUMA node of a PCI device, such as ``0000:3b:00.0``; empty if unknown."""
    node = read_text(root / "sys/bus/pci/devices" / pci.lower() / "numa_node").strip()
    return (
        set(numbers_in(read_text(root / f"sys/devices/system/node/node{node}/cpulist"))) if node.isdecimal() else set()
    )


def own_cores(rank: int, of_ranks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> set[int]:
    """The cores next to its GPU that a rank should keep to; empty to leave its affinity as it is.

    A launcher that has bound the ranks apart decides, and no rank gets less than its share of the node's cores.

    Args:
        rank: index of the rank on its node.
        of_ranks: for each rank of the node, the cores that it may use and those next to its GPU.
    """
    given, near = map(set, of_ranks[rank])
    mine = given & near
    sharing = sum(bool(mine & set(others)) for _, others in of_ranks)
    unbound = all(set(cores) == given for cores, _ in of_ranks)
    return mine if unbound and mine != given and len(mine) * len(of_ranks) >= len(given) * sharing else set()


def keep_to(cores: set[int]) -> None:
    """Binds all threads of this process, also those that they start, to these cores."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended, or the cores are not ours
            os.sched_setaffinity(int(thread), cores)

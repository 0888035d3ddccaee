"""What the links and devices of a job deliver, measured before the first step, and which are slow. Pure.

Links are judged by the bus bandwidth of an allreduce, 2 (n - 1) / n bytes over its time, which does not depend on the
number of ranks n (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = "hpctrain-speeds "
"""Precedes the measurements, as JSON, in the output of ``hpctrain.backends.torch.measure``."""
OF_PEERS = 0.75
"""Fraction of the median of its peers below which a link or device is slow; equal parts differ by up to a tenth."""
LEAST_WITHIN, LEAST_BETWEEN = 2.0, 1.0
"""GB/s that GPUs of a node, and of two nodes, exceed unless something is wrong: PCIe 3 gives 5, 10 Gbit/s give 1.2."""
MISSING = {
    "InfiniBand": "libibverbs is missing: install rdma-core in the job's environment or image, and give containers "
    "/dev/infiniband",
    "Omni-Path": "libnccl-net (aws-ofi-nccl) is missing: put it and libfabric on LD_LIBRARY_PATH",
    "EFA": "libnccl-net (aws-ofi-nccl) is missing: put it and libfabric on LD_LIBRARY_PATH",
    "Slingshot": "libnccl-net (aws-ofi-nccl) is missing: load the site's module, or put it and libfabric on "
    "LD_LIBRARY_PATH, also in containers",
}
"""What NCCL lacks if it does not use a network, by the network's name."""


@dataclass(frozen=True)
class Speeds:
    """Measurements of all ranks."""

    device: str
    """What ranks compute on: ``cuda``, ``xpu`` or ``cpu``."""
    within: Mapping[str, float] = field(default_factory=dict)
    """GB/s of an allreduce over the ranks of a node, by host."""
    between: Sequence[tuple[str, str, float]] = ()
    """GB/s of an allreduce over the ranks of two nodes, with their hosts."""
    devices: Sequence[tuple[str, int, float]] = ()
    """Host, local rank, and TFLOP/s of a matrix product."""
    network: str = ""
    """Network that NCCL uses between nodes, as it calls it: IB, Socket, AWS Libfabric, ...; empty if unknown."""
    fabrics: Mapping[str, str] = field(default_factory=dict)
    """Fast network of each host that has one; see ``system.fabric``."""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Speeds:
        """The inverse of ``json.dumps(dataclasses.asdict(speeds))``."""
        return cls(**found)

    def sentences(self) -> Iterator[tuple[str, str]]:
        """Topics and the figures in words."""
        links = [("within a node", list(self.within.values())), ("between nodes", [gb for *_, gb in self.between])]
        words = [f"{_range(values)} GB/s {where}" for where, values in links if values]
        if words:
            by = f", NCCL over {self.network}" if self.network and self.between else ""
            yield "links", f"{', '.join(words)} (64 MB allreduce{by})"
        if self.devices:
            yield "matrix product", f"{_range([tflops for *_, tflops in self.devices])} TFLOP/s on each {self.device}"


@dataclass(frozen=True)
class Slow:
    """A link or device that would slow the run."""

    what: str
    fix: str
    host: str | None = None
    """The only host that it may be about."""
    fatal: bool = False


def judge(speeds: Speeds) -> Iterator[Slow]:
    """Yields what is slow, most serious first."""
    if speeds.network == "Socket" and speeds.between and speeds.fabrics:
        fabric = next(iter(speeds.fabrics.values()))
        what = f"NCCL uses sockets between nodes although there is {fabric} on {_names(sorted(speeds.fabrics))}"
        yield Slow(what, f"{MISSING[fabric]}; to use sockets anyway: export NCCL_NET=Socket", fatal=True)
    is_gpu = speeds.device != "cpu"
    for host, gb in speeds.within.items():
        if why := _too_slow(gb, _others(speeds.within, host), LEAST_WITHIN * is_gpu, "GB/s"):
            fix = "compare nvidia-smi topo -m with other hosts: NVLink or a PCIe slot may have failed; or exclude it"
            yield Slow(f"ranks on {host} exchange at {why}", fix, host)
    best: dict[str, float] = {}
    for one, other, gb in speeds.between:
        best |= {host: max(gb, best.get(host, 0.0)) for host in (one, other)}
    slow: set[str] = set()
    for host, gb in best.items():
        if why := _too_slow(gb, _others(best, host), 0.0, "GB/s"):
            slow.add(host)
            yield Slow(f"{host} exchanges with other nodes at {why}", "exclude it, and tell the site", host)
    rates = {(one, other): gb for one, other, gb in speeds.between}
    for (one, other), gb in rates.items():
        why = _too_slow(gb, _others(rates, (one, other)), LEAST_BETWEEN * is_gpu, "GB/s")
        if why and slow.isdisjoint((one, other)):
            yield Slow(
                f"{one} and {other} exchange at {why}", "set NCCL_SOCKET_IFNAME or NCCL_IB_HCA, or tell the site"
            )
    products = {(host, rank): tflops for host, rank, tflops in speeds.devices}
    for (host, rank), tflops in products.items() if is_gpu else ():
        if why := _too_slow(tflops, _others(products, (host, rank)), 0.0, "TFLOP/s"):
            fix = "look at its clocks, temperature and other processes (nvidia-smi -q -d PERFORMANCE), or exclude it"
            yield Slow(f"the GPU of local rank {rank} on {host} computes at {why}", fix, host)


def network_of(log: str) -> str:
    """The network that NCCL chose, from its debug output; empty if it does not say so."""
    return next(reversed(re.findall(r"NCCL INFO Using network (.+)", log)), "").strip()


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours on a ring of nodes, in rounds in which no node occurs twice."""
    ring = [(node, (node + 1) % nodes) for node in range(nodes)] if nodes > 2 else [(0, 1)][: nodes - 1]
    odd = [ring.pop()] if len(ring) > 1 and len(ring) % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], odd) if pairs]


def bus_gb_per_s(num_bytes: int, ranks: int, seconds: float) -> float:
    """Bus bandwidth of an allreduce in GB/s."""
    return 2 * (ranks - 1) / ranks * num_bytes / seconds / 1e9


def _too_slow(value: float, others: Sequence[float], least: float, unit: str) -> str:
    """Describes a value that is too small; empty if it is not."""
    typical = statistics.median(others) if others else 0.0
    if value < OF_PEERS * typical:
        return f"{value:.3g} {unit}, its peers at {typical:.3g}"
    return f"{value:.2g} {unit}, less than {least:g}" if value < least else ""


def _others(values: Mapping[Any, float], own: Any) -> list[float]:
    return [value for key, value in values.items() if key != own]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _names(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")

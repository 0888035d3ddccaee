"""Floating-point operations of a model, and the fraction of the device's peak that training achieves."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

from hpctrain.comm.world import World

MEASURED_S = 0.05
"""Minimum time, in seconds, that a device is measured for."""
LEAST_PRODUCTS = 3
"""On a GPU, whose first product loads the kernel; on CPUs, one in 16 bits may take 0.2 s."""
CPU_SIZE, GPU_SIZE = 512, 4096
"""Rows of the square matrices that are multiplied."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of a model's training, and a device's speed."""

    per_sample: float
    """Operations for training on one sample: the forward pass, and twice as many for the backward pass."""
    peak_per_s: float
    """Operations per second of a large matrix product in the model's compute dtype, measured."""
    sheet_per_s: float = 0.0
    """The same according to the device's data sheet; 0 if unknown."""

    def utilisation(self, samples_per_s: float) -> float:
        """Model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B), from 0 to about 1.

        It is a share of the data sheet's peak, as others give it; of the measured peak if that is unknown.

        Args:
            samples_per_s: samples per second of wall-clock time that the rank trains on.
        """
        return samples_per_s * self.per_sample / (self.sheet_per_s or self.peak_per_s)


def of_all(own: Flops | None, world: World) -> Flops | None:
    """Averages over the ranks that know their FLOPs, so that utilisation is that of the whole machine. Collective.

    All ranks use the same number, since each measures its device while others are busy. None if some part of the model
    (such as a stage) has no rank that knows its FLOPs.

    Args:
        own: this rank's; None if unknown, as on a rank without samples in the first batch.
        world: all ranks.
    """
    place = [world.pipeline.rank, world.tensor.rank]
    parts: dict[tuple[int, int], list[Flops]] = {}
    for (stage, tensor), speeds in world.everyone.allgather(
        [place, own and dataclasses.astuple(own)], "compare the speeds of their devices"
    ):
        known = parts.setdefault((stage, tensor), [])
        if speeds:
            known.append(Flops(*speeds))
    if not all(parts.values()):
        return None

    def mean(field: Callable[[Flops], float]) -> float:
        return statistics.fmean(statistics.fmean(map(field, known)) for known in parts.values())

    all_known = all(each.sheet_per_s for known in parts.values() for each in known)
    found = Flops(
        mean(lambda each: each.per_sample),
        mean(lambda each: each.peak_per_s),
        mean(lambda each: each.sheet_per_s) if all_known else 0.0,
    )
    return found if found.per_sample else None


def peak_per_s(multiply: Callable[[], object], size: int) -> float:
    """Operations per second of the fastest of several products of matrices.

    Args:
        multiply: computes one product, and returns when it is done.
        size: rows of the matrices; CPU_SIZE on a CPU.
    """
    fastest = math.inf
    done = 0
    until = time.perf_counter() + MEASURED_S
    least = 1 if size == CPU_SIZE else LEAST_PRODUCTS
    while done < least or time.perf_counter() < until:
        began = time.perf_counter()
        multiply()
        fastest = min(fastest, time.perf_counter() - began)
        done += 1
    return 2 * size**3 / max(fastest, 1e-9)

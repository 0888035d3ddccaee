"""Floating-point operations of a model, and the share of the device's speed that training makes of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.comm.world import World

MEASURED_S = 0.05
"""Seconds of matrix products by which a device is measured."""
LEAST_PRODUCTS = 3
CPU_SIZE, GPU_SIZE = 512, 4096
"""Rows of the matrices."""


@dataclass(frozen=True)
class Flops:
    """Of a rank."""

    per_sample: float
    """Operations that training on a sample takes of it: forward, and twice that backward."""
    peak_per_s: float
    """What the device reached in a product of large matrices, of the type that the model computes in."""

    def utilisation(self, samples_per_s: float) -> float:
        """Model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B), from 0 to about 1.

        Args:
            samples_per_s: that the rank trains on, by wall clock.
        """
        return samples_per_s * self.per_sample / self.peak_per_s


def of_all(own: Flops | None, world: World) -> Flops | None:
    """The mean over the ranks that know theirs: operations of all by the speed of all is the use of the whole machine.

    One number that ranks share, since each of them measures while others work. None if there is a part of the
    model, one stage say, of which no rank knows them. Collective.

    Args:
        own: of this rank; None if that cannot be said, such as of a rank without samples in the first batch.
        world: all ranks.
    """
    place = [world.pipeline.rank, world.tensor.rank]
    mine = [place, [own.per_sample, own.peak_per_s] if own else None]
    parts: dict[tuple[int, int], list[list[float]]] = {}
    for (stage, tensor), told in world.everyone.allgather(mine, "compare the speeds of their devices"):
        parts.setdefault((stage, tensor), []).extend([] if told is None else [told])
    if not all(parts.values()):
        return None
    means = [list(map(statistics.fmean, zip(*known, strict=True))) for known in parts.values()]
    per_sample, peak = map(statistics.fmean, zip(*means, strict=True))
    return Flops(per_sample, peak) if per_sample else None


def peak_per_s(multiply: Callable[[], object], operations: float) -> float:
    """Operations a second of the fastest of some products of matrices.

    Args:
        multiply: makes one, and returns when it is done.
        operations: of one.
    """
    fastest, done, until = math.inf, 0, time.perf_counter() + MEASURED_S
    while done < LEAST_PRODUCTS or time.perf_counter() < until:
        began = time.perf_counter()
        multiply()
        fastest = min(fastest, time.perf_counter() - began)
        done += 1
    return operations / max(fastest, 1e-9)

"""Which part of the step holds the time that a rank is behind its peers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.monitor.window import BUSY, CAUSES, GC
from hpctrain.train.clock import Phase

Array = NDArray[np.floating]

COMPUTE = "compute"
"""All parts are equally slower: the processor, not the program."""
MIXED = "mixed"
"""Several parts, but not all."""
NETWORK = "network"
"""The exchange."""

DOMINANT = 0.8
"""Share of the excess that one phase must hold to be the cause."""
COMPUTE_PHASES = (Phase.TO_DEVICE, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def cause_of(extra: Array, normal: Array) -> str:
    """Names the cause.

    A phase that holds 80% of the excess is the cause, unless the rest of the step is slower by a similar factor: a
    processor that is throttled or shared slows all phases, and most seconds are then lost in the longest one.

    Args:
        extra: [len(CAUSES)] seconds a step above the peers.
        normal: [len(CAUSES)] seconds a step of the peers.
    """
    busy = list(BUSY)
    total = float(extra[busy].sum())
    usual = float(normal[busy].sum())
    if total <= 0:
        return MIXED
    if extra[GC] >= DOMINANT * total:
        return CAUSES[GC]
    top = busy[int(np.argmax(extra[busy]))]
    rest, rest_usual = total - float(extra[top]), usual - float(normal[top])
    rest_slower = rest / max(rest_usual, 1e-9) >= 0.5 * float(extra[top]) / max(float(normal[top]), 1e-9)
    if extra[top] >= DOMINANT * total and not (rest_slower and rest >= 0.1 * total):
        return CAUSES[top]
    large = [column for column in busy if normal[column] >= 0.1 * usual]
    alike = all(extra[column] / normal[column] >= 0.4 * total / max(usual, 1e-9) for column in large)
    if (alike and len(large) > 1) or float(extra[list(COMPUTE_PHASES)].sum()) >= DOMINANT * total:
        return COMPUTE
    return MIXED

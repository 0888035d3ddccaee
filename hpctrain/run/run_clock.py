"""The clock that moments of different hosts are compared by: that of rank 0's host. Others may differ by seconds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence

AHEAD_S = "HPCTRAIN_CLOCK_AHEAD_S"
"""Variable that says how far this host's clock is ahead; the processes that a rank starts have it, too."""
ROUNDS = 4


def now() -> float:
    """Unix seconds."""
    return time.time() - float(os.environ.get(AHEAD_S) or 0)


def ahead_s(gather: Callable[[float], Sequence[float]]) -> float:
    """Seconds by which this clock is ahead of rank 0's; 0 if it may be right, as far as messages can show.

    ``gather``, which is collective, returns the values of all ranks.
    """
    most, least, before = math.inf, -math.inf, -math.inf
    for _ in range(ROUNDS):
        sent = time.time()
        first = gather(sent)[0]
        most = min(most, time.time() - first)
        least, before = max(least, before - first), sent  # rank 0 had received ``before`` when it sent this
    return 0.0 if least <= 0 <= most else (least + most) / 2

"""A common clock for all hosts of a run: that of rank 0's host. Hosts' own clocks may differ by seconds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence

AHEAD_S = "HPCTRAIN_CLOCK_AHEAD_S"
"""Environment variable: seconds by which this host's clock is ahead; inherited by processes that a rank starts."""
ROUNDS = 4


def now() -> float:
    """Returns Unix seconds by rank 0's clock."""
    return time.time() - float(os.environ.get(AHEAD_S) or 0)


def ahead_s(gather: Callable[[float], Sequence[float]]) -> float:
    """Estimates the seconds by which this clock is ahead of rank 0's; 0 if the messages allow that it is right.

    Collective; ``gather`` returns the values of all ranks.
    """
    most, least, before = math.inf, -math.inf, -math.inf
    for _ in range(ROUNDS):
        sent = time.time()
        first = gather(sent)[0]
        most = min(most, time.time() - first)
        least, before = max(least, before - first), sent  # rank 0 had received ``before`` when it sent this
    return 0.0 if least <= 0 <= most else (least + most) / 2

"""Rank and world size: the ranks of a job, and what they exchange.

``group`` has the collectives, each of which ends after a time limit, and ``world`` finds out which ranks there are.
Needs mpi4py only if there are several.
"""

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.world import EXPECTED_RANKS, QUICK_START, World, alone, connect

__all__ = [
    "EXPECTED_RANKS",
    "QUICK_START",
    "TIMEOUT_S",
    "Group",
    "World",
    "alone",
    "connect",
]

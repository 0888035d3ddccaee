"""Which network switches are above this node, as Slurm tells, and an order of ranks that crosses them least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
"""Such as ``s0.s4.tux1`` and ``switch.switch.node``; set on each node if its cluster has a topology."""


def switches(environment: Mapping[str, str]) -> list[str]:
    """From the top of the network down to this node's; none if Slurm does not tell."""
    kinds = environment.get(PATTERN, "").split(".")
    names = environment.get(ADDRESS, "").split(".", len(kinds) - 1)  # the node's name comes last, and may have dots
    return [name for name, kind in zip(names, kinds, strict=False) if name and kind not in ("", "node")]


def in_order(paths: Sequence[Sequence[str]]) -> list[int]:
    """Ranks, those of each switch one after the other; as they are if they are so already, or if a path is unknown.

    Args:
        paths: switches of each rank.
    """
    if not all(paths):
        return list(range(len(paths)))
    first: dict[tuple[str, ...], int] = {}

    def place(rank: int) -> tuple[list[int], int]:
        path = paths[rank]
        return [first[tuple(path[: depth + 1])] for depth in range(len(path))], rank

    for rank, path in enumerate(paths):
        for depth in range(len(path)):
            first.setdefault(tuple(path[: depth + 1]), rank)
    return sorted(range(len(paths)), key=place)

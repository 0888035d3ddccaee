"""Environment variables for third-party programs, as their own launchers would set them. Pure, except for the port."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a rank is among all ranks and nodes."""

    rank: int
    size: int
    local_rank: int
    """Rank on its node."""
    local_size: int
    node: int
    """Index of its node; nodes are ordered by their lowest rank."""
    nodes: int
    host: str


def place_of(rank: int, hosts: Sequence[str]) -> Place:
    """Returns the place of a rank.

    Args:
        rank: the rank.
        hosts: host of each rank, by rank.
    """
    mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    nodes = list(dict.fromkeys(hosts))
    return Place(rank, len(hosts), mine.index(rank), len(mine), nodes.index(hosts[rank]), len(nodes), hosts[rank])


def variables(convention: str, place: Place, addresses: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Returns the environment variables of a rank.

    Args:
        convention: ``torch`` (as torchrun sets them), ``tensorflow`` (TF_CONFIG, all ranks are workers), ``auto``
            (both), or ``mpi`` (none: the launcher's own suffice).
        place: place of the rank.
        addresses: host and free port of each rank, by rank. If there is only one node, 127.0.0.1 replaces the host.
    """
    reached = [("127.0.0.1" if place.nodes == 1 else host, port) for host, port in addresses]
    found: dict[str, str] = {}
    if convention in ("torch", "auto"):
        numbers = {
            "RANK": place.rank,
            "WORLD_SIZE": place.size,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_WORLD_SIZE": place.local_size,
            "GROUP_RANK": place.node,
            "MASTER_PORT": reached[0][1],
        }
        found |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": reached[0][0]}
    if convention in ("tensorflow", "auto"):
        workers = [f"{host}:{port}" for host, port in reached]
        task = {"type": "worker", "index": place.rank}
        found["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return found


def reserve_port() -> socket.socket:
    """Reserves a free port of this host for as long as the returned socket is open.

    The socket does not listen and sets SO_REUSEADDR, as servers do. So the program can listen on the port at any time,
    and the kernel gives it to no other process until then.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder

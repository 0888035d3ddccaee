"""Finds the address at which a job's other hosts reach this one. Uses numeric addresses only, no name lookups."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"
BRIDGES = ("docker", "virbr", "cni", "veth", "br-")
"""Prefixes of interfaces that lead only to containers of this host."""


@dataclass(frozen=True)
class Interface:
    """One address of this host."""

    address: str
    network: str
    """Network with prefix length, in the notation of ipaddress."""
    speed: int
    """Mbit/s; 0 if unknown, which is common for InfiniBand."""
    fast: bool = False
    """Whether it is on InfiniBand or Slingshot."""


def interfaces() -> list[Interface]:
    """Returns this host's addresses that others can reach."""
    speeds = {name: stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        if name not in speeds or name.startswith(BRIDGES):
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                network = ipaddress.ip_network(
                    (str(address), prefix_of(entry.netmask, address.max_prefixlen)), strict=False
                )
                found.append(Interface(str(address), str(network), speeds[name], is_fast(name)))
    return found


def is_fast(name: str, root: Path = Path("/sys/class/net")) -> bool:
    """Whether an interface is on InfiniBand (its hardware type is 32) or Slingshot (it is called hsn0, hsn1, ...)."""
    with contextlib.suppress(OSError):
        return name.startswith("hsn") or (root / name / "type").read_text().strip() == "32"
    return False


def listen(address: str | None, port: int = 0) -> socket.socket:
    """Opens a listening socket.

    Args:
        address: numeric address of this host; None listens on all addresses, of both IP versions if available.
        port: port number; 0 for a free one.

    Raises:
        OSError: the address or the port cannot be used.
    """
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    family = socket.AF_INET6 if ":" in (address or "") else socket.AF_INET
    return socket.create_server((address or "", port), family=family, backlog=1024)


def prefix_of(netmask: str | None, whole: int) -> int:
    """Converts a netmask from psutil (which spells IPv6 masks out) to a prefix length; ``whole`` if there is none."""
    return int(ipaddress.ip_address(netmask)).bit_count() if netmask else whole


def meeting_address(own: Sequence[Interface], others: Sequence[Sequence[str]]) -> str | None:
    """Returns the address at which every other host of the job reaches this one directly, on the fastest network.

    InfiniBand and Slingshot come before Ethernet, then the speed decides.

    Hosts with the same addresses as this one are this host (tests run several nodes on one machine); if there are no
    others, loopback is used.

    Args:
        own: this host's interfaces.
        others: addresses of each other host.

    Returns:
        The address, or None if there is no such network.
    """
    here = {interface.address for interface in own}
    elsewhere = [set(addresses) for addresses in others if set(addresses) != here]
    if not elsewhere:
        return LOOPBACK
    parsed = [[ipaddress.ip_address(address) for address in addresses] for addresses in elsewhere]
    shared = []
    for interface in own:
        network = ipaddress.ip_network(interface.network)
        address = ipaddress.ip_address(interface.address)
        if all(address not in host and any(one in network for one in host) for host in parsed):
            shared.append(interface)
    return max(shared, key=lambda interface: (interface.fast, interface.speed)).address if shared else None


def routed_address(others: Sequence[Sequence[str]]) -> str | None:
    """Returns the source address of packets from this host to another of the job; None if there is no route."""
    for address in (address for addresses in others for address in addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            source = str(probe.getsockname()[0])
            if not ipaddress.ip_address(source).is_loopback:
                return source
    return None


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this address of this host; None if there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address.partition("%")[0] for entry in entries]:
            return name
    return None

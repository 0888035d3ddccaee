"""Settings of NCCL, and the end of a process that has used gloo."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from hpctrain.backends.torch import process_groups
from hpctrain.backends.torch.process_groups import (
    GLOO_THREAD,
    IN_SWITCHES,
    INTERFACE,
    await_gloo,
    sum_exactly,
    use_shared_network,
)
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.system.address import Interface
from tests.support.mpi import PATIENCE_S

PR_SET_NAME = 15


@pytest.fixture
def busy() -> Callable[..., threading.Event]:
    """``busy(name)`` starts a thread that the kernel knows by that name; it says when it has computed for a while."""

    def start(name: str, rounds: int = 1) -> threading.Event:
        named, over = threading.Event(), threading.Event()

        def compute() -> None:
            ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
            named.set()
            for _ in range(rounds):
                hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock, as gloo computes
                if rest.is_set():
                    return
            over.set()
            rest.wait(PATIENCE_S)

        threading.Thread(target=compute, daemon=True).start()
        named.wait(PATIENCE_S)
        return over

    rest = threading.Event()
    yield start
    rest.set()


def test_the_end_waits_until_gloos_threads_have_nothing_left_to_do(busy):
    over = busy(GLOO_THREAD)
    await_gloo(60)
    assert over.is_set()


def test_the_end_does_not_wait_for_others_nor_for_ever(busy):
    others = busy("numpy", 100)
    await_gloo(60)
    assert not others.is_set()
    over = busy(GLOO_THREAD, 100)
    await_gloo(0.05)
    assert not over.is_set()


def test_nccl_does_not_add_in_switches_unless_the_user_lets_it(monkeypatch):
    first, other = IN_SWITCHES
    monkeypatch.setenv(first, "1")
    monkeypatch.delenv(other, raising=False)
    sum_exactly()
    assert (os.environ[first], os.environ.pop(other)) == ("1", "0")


@pytest.mark.parametrize(("own", "nodes", "found"), [(None, 2, "=ib0"), (None, 1, None), ("eth1", 2, "eth1")])
def test_nccl_uses_the_network_that_the_hosts_meet_on(own, nodes, found, monkeypatch):
    monkeypatch.setenv(INTERFACE, own or "")
    if own is None:
        monkeypatch.delenv(INTERFACE)
    monkeypatch.setattr(process_groups, "interfaces", lambda: [Interface("10.4.0.1", "10.4.0.0/16", 0, fast=True)])
    monkeypatch.setattr(process_groups, "interface_of", {"10.4.0.1": "ib0"}.get)
    group = Group("two hosts")
    monkeypatch.setattr(group, "allgather", lambda mine, what: [mine, ["10.4.0.2"]])
    use_shared_network(World(group, group, group, node=0, nodes=nodes, host="here"), torch.device("cuda"))
    assert os.environ.pop(INTERFACE, None) == found


class OldGloo:
    """Gloo's process group as PyTorch 2.6 has it, whose options have no name of the group."""

    class _Options:
        __slots__ = ("_devices", "_timeout")

    create_device = staticmethod(lambda hostname: hostname)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options = options


def test_gloo_of_pytorch_2_6_opens_without_a_name(monkeypatch):
    monkeypatch.setattr(process_groups.dist, "ProcessGroupGloo", OldGloo)
    opened: Any = process_groups.gloo("10.4.0.1", None, 0, 2, timedelta(seconds=1), "data", [0, 1])  # type: ignore[arg-type]
    assert opened.options._devices == ["10.4.0.1"]


@pytest.mark.parametrize(("version", "newer"), [("2.7.1", False), ("2.8.0", True), ("2.13.0+cpu", True)])
def test_a_store_listens_on_an_open_socket_in_every_pytorch(version, newer, monkeypatch):
    """The newer kind of store refuses one in PyTorch 2.6 and 2.7, and the first rank then hangs."""
    kinds: list[bool] = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(process_groups.dist, "TCPStore", lambda *_, use_libuv, **__: kinds.append(use_libuv))
    monkeypatch.setattr(process_groups.dist, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(process_groups, "meeting_address", lambda *_: "127.0.0.1")
    with pytest.raises(AssertionError, match="agreed"):  # the made store is none
        process_groups.meet(Group("alone"), "data")
    assert kinds == [newer]

"""Horovod's preconditions: each one that is not met is one clear sentence."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.reduce import horovod_setup

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4
7f01-7f02 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4
7f02-7f03 r-xp 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi_cxx.so.40.30.1
7f03-7f04 rw-p 00000000 00:00 0
7f04-7f05 r-xp 00000000 08:01 13 /home/a b/lib/libc.so.6
"""


def test_one_mpi_library_is_one():
    assert horovod_setup.mpi_libraries(MAPS) == ["/usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4"]


def test_two_mpi_libraries_are_named():
    more = MAPS + "7f05-7f06 r-xp 00000000 08:01 14 /opt/mpich/lib/libmpi.so.12.3.1\n"
    assert len(horovod_setup.mpi_libraries(more)) == 2


def test_different_mpi_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "horovod.torch", SimpleNamespace())
    monkeypatch.setattr(horovod_setup, "mpi_libraries", lambda maps: ["/a/libmpi.so.40", "/b/libmpi.so.12"])
    with pytest.raises(UserError, match=r"different MPI libraries: /a/libmpi.so.40 and /b/libmpi.so.12") as caught:
        horovod_setup.load("torch")
    assert "install-horovod" in caught.value.fix


def test_missing_horovod_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    with pytest.raises(UserError, match="Horovod is not installed") as caught:
        horovod_setup.load("torch")
    assert "hpctrain install-horovod" in caught.value.fix
    assert not horovod_setup.available("torch")


def test_other_ranks_than_mpi_sees_are_a_clear_error(monkeypatch):
    for name in horovod_setup.SETTINGS:
        monkeypatch.setenv(name, "1")
    alone = SimpleNamespace(
        init=lambda: None, is_initialized=lambda: False, rank=lambda: 0, size=lambda: 3, shutdown=lambda: None
    )
    with pytest.raises(UserError, match="rank 0 of 3 where MPI sees rank 0 of 1"):
        horovod_setup.start(alone, Group("data"), on_gpu=False)


@pytest.mark.parametrize(
    ("cuts", "elements", "most", "least"),
    [(True, 100, 2**22, 2**18), (True, 2**33, 2**24, 2**20), (False, 100, 100, 100), (False, 0, 1, 1)],
)
def test_messages_are_cut_for_caches_but_not_into_more_than_horovod_remembers(cuts, elements, most, least):
    module: Any = None
    lease = horovod_setup.Lease(module, 0, cuts)
    assert (lease.most(elements, 4), lease.least(elements, 4)) == (most, least)
    assert lease.most(elements, 4, 2**22) <= most


@pytest.mark.parametrize(("cuts", "elements", "apart"), [(True, 100, 2**18), (False, 100, 2**20), (True, 2**30, 2**22)])
def test_gradients_of_a_mebibyte_are_separate_messages_up_to_a_limit(cuts, elements, apart):
    module: Any = None
    assert horovod_setup.Lease(module, 0, cuts).apart(elements, 4) == apart

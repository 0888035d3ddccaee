"""What an exchange over a process group of torch holds while messages are under way."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hpctrain.backends.torch.process_groups import ProcessGroup
from hpctrain.backends.torch.reduce.messages import POLL_S, HorovodSender
from hpctrain.backends.torch.strategies.exchange import HostExchange, TorchExchange
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.comm.group import MOST_COUNTED_S, Group
from hpctrain.errors import RunFailed
from hpctrain.reduce.horovod_setup import Lease
from hpctrain.train.clock import NO_CLOCK, Waiting


class Message:
    """Is through when a test says so; gloo says so only to who waits."""

    def __init__(self) -> None:
        self.is_through = False

    def is_completed(self) -> bool:
        return self.is_through

    def wait(self) -> None:
        assert self.is_through, "nobody has to wait"


class Queue:
    """Of messages that leave this rank one after the other."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Message:
        self.messages.append(Message())
        return self.messages[-1]


def test_what_is_through_is_freed_before_the_end_of_an_update():
    ranks = Queue()
    exchange = TorchExchange(ProcessGroup(Group("pipeline"), ranks, torch.device("cpu")), Waiting(NO_CLOCK))
    held: list[weakref.ref[Tensor]] = []
    for number in range(4):
        values = torch.ones(3)
        exchange.post(values, 1, 0)
        held.append(weakref.ref(exchange.under_way[-1][1]))
        if number > 0:
            ranks.messages[number - 1].is_through = True
    del values
    exchange.post(torch.ones(3), 1, 0)
    gc.collect()
    assert [one() is not None for one in held] == [False, False, False, True]


class Noted(HostExchange):
    """Exchanges with nobody, and records in which types it adds."""

    def __init__(self, adds_halves: bool) -> None:
        super().__init__(Group("tensor"), Waiting(NO_CLOCK))
        self.adds_halves, self.added = adds_halves, list[torch.dtype]()

    def sum(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        self.added.append(dtype)
        return values.to(dtype, copy=True)


@pytest.mark.parametrize(
    ("able", "exact", "wanted"),
    [(True, False, torch.bfloat16), (True, True, torch.float32), (False, False, torch.float32)],
)
def test_16_bit_values_are_added_in_fp32_unless_asked_and_able(able, exact, wanted):
    exchange = Noted(able)
    tp_group = TPGroup(exchange.group, exchange=exchange, exact=exact)
    for dtype in (torch.bfloat16, torch.float64):
        assert tp_group.summed(torch.ones(2, dtype=dtype), "add up").dtype == dtype
    assert exchange.added == [wanted, torch.float64]


def test_a_sum_that_horovod_never_ends_is_given_up(monkeypatch):
    ticks, slept = itertools.count(step=MOST_COUNTED_S), set[float]()
    monkeypatch.setattr("hpctrain.comm.group.time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=slept.add))
    monkeypatch.setattr(os, "sched_yield", lambda: slept.add(0))
    horovod = SimpleNamespace(grouped_allreduce_async_=lambda *_, **__: 7, poll=lambda handle: False, Sum=0)
    wait = HorovodSender(Lease(horovod, 0), Group("data")).send(torch.zeros(3), 0)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="rank 0 of 1 waited 900 s for the other ranks to add up gradients"):
        wait()
    assert slept == {POLL_S}  # never more often: each poll stops Horovod's thread


def test_horovods_messages_are_few_in_all_however_gradients_are_divided():
    names: list[str] = []
    horovod = SimpleNamespace(grouped_allreduce_async_=lambda *_, name, **__: names.append(name), Sum=0)
    whole = torch.zeros(1, device="meta").expand(2**21)  # 8 MiB
    for elements in (2 * len(whole), 2**30):
        sender = HorovodSender(Lease(horovod, 0, cuts=True), Group("data"), elements)  # type: ignore[arg-type]
        names.clear()
        sender.send(whole, 0)
        sender.send(whole, len(whole))
        assert len(names) == len(set(names)) == (4 if elements < 2**30 else 2)

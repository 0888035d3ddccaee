"""A program that ends before it has read its last exchange of flags."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

from hpctrain.backends.torch.reduce import any_of


class Unfinished:
    """An exchange with a rank that has failed."""

    def __init__(self) -> None:
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits.append(timeout)
        raise RuntimeError("Connection closed by peer")


def test_the_last_exchange_is_awaited_at_exit_but_not_for_long(monkeypatch):
    """Its thread would abort the process if it ended while the interpreter shuts down."""
    made: list[Unfinished] = []
    at_exit: list[Callable[[], object]] = []

    def all_reduce(*given, **more):
        made.append(Unfinished())
        return made[-1]

    monkeypatch.setattr(dist, "new_group", lambda **more: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(any_of, "ends_calmly", lambda: at_exit.append(lambda: None))
    monkeypatch.setattr(
        any_of, "atexit", SimpleNamespace(register=lambda *call: at_exit.append(functools.partial(*call)))
    )
    start = any_of.start_any()
    start(False)
    start(False)
    at_exit[-1]()
    assert [one.waits for one in made] == [[], [timedelta(seconds=any_of.LAST_S)]]

"""When a rank decides to keep its memory; tests/dist has one that does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.comm.world import alone
from hpctrain.rank import kept_memory
from hpctrain.rank.kept_memory import KeptMemory
from hpctrain.system import heap
from hpctrain.system.heap import Usage

PEAK = 1 << 30
IDLE, BUSY = 0.01, 0.4
"""Shares of a second in the kernel."""


def says(monkeypatch: pytest.MonkeyPatch, shares: list[float], left: int = PEAK, gives_back: bool = True) -> list[str]:
    """What is said of steps of a second each, with these shares of time in the kernel."""
    said: list[str] = []
    hook = KeptMemory(said.append)
    kernel_s = 0.0
    trainer = SimpleNamespace(
        world=alone(),
        framework=SimpleNamespace(facts=SimpleNamespace(gives_back=gives_back)),
        state=SimpleNamespace(step=0),
    )
    monkeypatch.setattr(heap, "left_bytes", lambda: left)
    monkeypatch.setattr(heap, "keep_freed", lambda: True)
    hook.before_fit(trainer)
    for second, share in enumerate(shares):
        kernel_s += share
        now = Usage(second, kernel_s, 100_000 * second, PEAK)
        monkeypatch.setattr(Usage, "now", lambda now=now: now)
        monkeypatch.setattr(kept_memory, "monotonic", lambda now=now: now.seconds)
        trainer.state.step += 1
        hook.after_step(trainer, None)
    return said


def test_memory_is_kept_once_the_kernel_took_two_looks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = says(monkeypatch, [BUSY, BUSY, IDLE, BUSY, IDLE, BUSY, BUSY, BUSY, BUSY])
    assert said.startswith("for 40% of the time") and "from step 7 on" in said


def test_the_first_step_makes_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not says(monkeypatch, [BUSY, BUSY, BUSY])
    assert says(monkeypatch, [BUSY, BUSY, BUSY, BUSY])


def test_it_is_not_kept_without_room_or_by_a_framework_that_does_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not says(monkeypatch, [BUSY] * 9, left=PEAK - 1)
    assert not says(monkeypatch, [BUSY] * 9, gives_back=False)


def test_a_user_who_has_chosen_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not says(monkeypatch, [BUSY] * 9)

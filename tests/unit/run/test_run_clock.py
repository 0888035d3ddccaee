"""Clocks of hosts that differ: moments are told by that of rank 0's host."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from hpctrain.run import last_words


def compared(monkeypatch: pytest.MonkeyPatch, ahead: Sequence[float]) -> list[float]:
    """What ranks find whose clocks are ahead by these seconds: real threads, one of which is late."""
    told, meeting, found = [0.0] * len(ahead), threading.Barrier(len(ahead)), [0.0] * len(ahead)
    mine = threading.local()
    own = time.time
    monkeypatch.setattr(last_words.time, "time", lambda: own() + getattr(mine, "ahead", 0.0))

    def rank(number: int) -> None:
        mine.ahead = ahead[number]

        def gather(moment: float) -> Sequence[float]:
            told[number] = moment
            meeting.wait()
            all_told = list(told)
            meeting.wait()
            return all_told

        found[number] = last_words.ahead_s(gather)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(ahead))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def test_how_far_a_clock_is_ahead_is_found_and_equal_clocks_are_left_alone(monkeypatch):
    first, same, late, early = compared(monkeypatch, [0.0, 0.0, 100.0, -3600.0])
    assert first == same == 0.0
    assert late == pytest.approx(100, abs=50) and early == pytest.approx(-3600, abs=50)


def test_moments_of_a_host_are_told_by_the_clock_of_the_first_one(monkeypatch):
    monkeypatch.setenv(last_words.AHEAD_S, "100.0")
    monkeypatch.setattr(last_words.time, "time", lambda: 1100.0)
    assert last_words.now() == 1000.0

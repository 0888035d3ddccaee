"""Waiting for a scheduler whose controller is away: a run must not end because that is restarted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain.errors import HpctrainError
from hpctrain.system.output import say

T = TypeVar("T")
PAUSES_S = (5.0, 10.0, *[20.0] * 44)
"""Between questions to a controller that does not hear: a quarter of an hour, and as long as its time-outs take."""


def patiently(ask: Callable[[], T], again: type[HpctrainError]) -> T:
    """What ``ask`` returns, which is called again after each error of this kind until PAUSES_S are over."""
    for pause in PAUSES_S:
        try:
            return ask()
        except again as error:
            say(f"{error.what}; asking again in {pause:.0f} s")
            time.sleep(pause)
    return ask()

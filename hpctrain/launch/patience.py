"""Waiting for a scheduler whose controller is away: a run must not end because that is restarted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain.errors import Code, ExitCode, HpctrainError
from hpctrain.run.folder import RunDir
from hpctrain.run.stop_request import requested_stop
from hpctrain.system.output import say

T = TypeVar("T")
PAUSES_S = (5.0, 10.0, *[20.0] * 44)
"""Between questions to a controller that does not hear: a quarter of an hour, and as long as its time-outs take."""
LOOK_S = 1.0
"""Seconds between two looks for the STOP file."""


class Stopped(HpctrainError):
    """A person wants the run to stop, and nothing of it runs."""

    exit_code = ExitCode.STOPPED
    code = Code.STOPPED


def patiently(ask: Callable[[], T], again: type[HpctrainError], run: RunDir) -> T:
    """What ``ask`` returns, which is called again after each error of this kind until PAUSES_S are over.

    Raises:
        Stopped: a person has made the STOP file meanwhile; what a signal left of one does not count.
    """
    for pause_s in PAUSES_S:
        try:
            return ask()
        except again as error:
            say(f"{error.what}; asking again in {pause_s:.0f} s")
            _pause(run, pause_s, error)
    return ask()


def _pause(run: RunDir, pause_s: float, error: HpctrainError) -> None:
    end = time.monotonic() + pause_s
    while (left_s := end - time.monotonic()) > 0:
        request = requested_stop(run)
        if request is not None and request.signal is None:
            raise Stopped(
                f"stopped by {request.by} while Slurm's controller was away ({error.what})",
                "hpctrain resume continues from the last checkpoint",
            ) from error
        time.sleep(min(LOOK_S, left_s))

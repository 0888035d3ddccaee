"""Retries while a scheduler's controller is down: a run must not end because it restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain.errors import Code, ExitCode, HpctrainError
from hpctrain.run.folder import RunDir
from hpctrain.run.stop_request import requested_stop
from hpctrain.system.output import say
from hpctrain.system.retry import retry

T = TypeVar("T")
PAUSES_S = (5.0, 10.0, *[20.0] * 44)
"""Seconds between requests to a controller that does not answer: 15 minutes in all, plus its own timeouts."""
LOOK_S = 1.0
"""Seconds between two checks for the STOP file."""


class Stopped(HpctrainError):
    """A person asked the run to stop while none of its ranks was running."""

    exit_code = ExitCode.STOPPED
    code = Code.STOPPED


def retry_outage(ask: Callable[[], T], again: type[HpctrainError], run: RunDir) -> T:
    """Calls ``ask`` until it does not raise ``again``, pausing PAUSES_S in between; returns its result.

    Raises:
        Stopped: a person created the STOP file meanwhile; one left by a signal does not count.
        HpctrainError: the last call raised it.
    """

    def pause(pause_s: float, error: HpctrainError) -> None:
        say(f"{error.what}; asking again in {pause_s:.0f} s")
        _pause(run, pause_s, error)

    return retry(ask, again, PAUSES_S, pause)


def _pause(run: RunDir, pause_s: float, error: HpctrainError) -> None:
    end = time.monotonic() + pause_s
    while (left_s := end - time.monotonic()) > 0:
        request = requested_stop(run)
        if request is not None and request.signal is None:
            fix = "hpctrain resume continues from the last checkpoint"
            raise Stopped(f"stopped by {request.by} while Slurm's controller was away ({error.what})", fix) from error
        time.sleep(min(LOOK_S, left_s))

"""``hpctrain.heartbeat()``: one call per step that lets the monitor watch third-party programs."""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
from collections.abc import Callable

from hpctrain.config.loading import load
from hpctrain.monitor.rank_monitor import start
from hpctrain.monitor.shared import BETWEEN_BEATS
from hpctrain.programs.folder_group import folder_world
from hpctrain.programs.own_loop import supervised
from hpctrain.run.rank_environment import current_attempt

POLL_STEPS = 32
"""Steps between checks for messages from the monitor."""


def heartbeat(samples: float = 1.0) -> None:
    """Reports that this rank has finished a step, so that the monitor can detect hangs and record stack traces.

    Call it on every rank, once per step, after the gradient exchange. The first call starts the monitor: it
    synchronizes the ranks and takes about a second. Later calls take a microsecond. Without a supervisor
    (``hpctrain run``, or a Slurm job of ``hpctrain submit``) it does nothing. It needs no MPI.

    Args:
        samples: number of samples that this rank processed in the step.

    Raises:
        RunFailed: the other ranks did not make their first call within 15 minutes.
    """
    beat()(samples)


@functools.cache
def beat() -> Callable[[float], None]:
    """Returns the function behind ``heartbeat``; the first call makes it and starts the monitor."""
    link = supervised()
    if link is None:
        return lambda samples: None
    world = folder_world("heartbeat", link.run_dir, current_attempt(), link.place)
    session = start(world, link.run_dir.path, load(link.run_dir.run_yaml).monitor)
    # A program that ends with an error must not wait for the other ranks.
    atexit.register(lambda: session.close(orderly=not hasattr(sys, "last_type")))
    steps = itertools.count(1)

    def record(samples: float) -> None:
        session.clock.end_step(samples)
        session.clock.beat(BETWEEN_BEATS)
        link.count("heartbeat")
        if next(steps) % POLL_STEPS == 0:
            session.poll()

    return record

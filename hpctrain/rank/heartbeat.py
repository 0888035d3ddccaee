"""``hpctrain.heartbeat()``: one call per step that lets the monitor watch third-party programs."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.config.loading import load
from hpctrain.monitor.rank.session import MonitorSession, start
from hpctrain.rank.convention import Place
from hpctrain.rank.folder_group import folder_world
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import PLACE, WATCHED_DIR, current_attempt

POLL_STEPS = 32
"""Steps between checks for messages from the monitor."""


def heartbeat(samples: float = 1.0) -> None:
    """Reports that this rank has ended a step, so that the monitor detects hangs and keeps the stacks of hanging ranks.

    Call it on every rank, once per step, after the exchange. The first call starts the monitor: it synchronizes the
    ranks and takes about a second; later calls take a microsecond. Without a supervisor
    (``hpctrain run``, a Slurm job of ``hpctrain submit``) it does nothing. It needs no MPI.

    Args:
        samples: samples of this rank in the step.

    Raises:
        RunFailed: the other ranks did not make their first call within 15 minutes.
    """
    beat()(samples)


@functools.cache
def beat() -> Callable[[float], None]:
    """The function behind ``heartbeat``, made at the first call."""
    folder, place = os.environ.get(WATCHED_DIR), os.environ.get(PLACE)
    if not folder or not place:
        return lambda samples: None
    run_dir = RunDir(Path(folder))
    world = folder_world("heartbeat", run_dir, current_attempt(), Place(**json.loads(place)))
    session = start(world, run_dir.path, load(run_dir.run_yaml).monitor)
    # What ends with an error does not wait for anybody.
    atexit.register(lambda: session.close(orderly=not hasattr(sys, "last_type")))
    return Heart(session).beat


class Heart:
    """Records the ends of steps on a monitor session's clock."""

    def __init__(self, session: MonitorSession) -> None:
        self.session = session
        self.steps = 0

    def beat(self, samples: float) -> None:
        """Records the end of a step."""
        self.session.clock.end_step(samples)
        self.steps += 1
        if self.steps % POLL_STEPS == 0:
            self.session.poll()

"""``hpctrain.heartbeat()``: one call a step, by which programs of others are watched."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.config.loading import load
from hpctrain.monitor.rank.session import Session, start
from hpctrain.rank.convention import Place
from hpctrain.rank.folder_group import folder_world
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import PLACE, WATCHED_DIR, current_attempt

POLL_STEPS = 32
"""Steps between looks at what the monitor has to say."""


def heartbeat(samples: float = 1.0) -> None:
    """Says that this rank has ended a step: the monitor then finds hangs, and keeps the stacks of those that hang.

    Call it on every rank, once in each step, behind the exchange. The first call starts the monitor, for which the
    ranks wait for each other; it takes about a second, later ones a microsecond. Without a supervisor
    (``hpctrain run``, a Slurm job of ``hpctrain submit``) it does nothing. It needs no MPI.

    Args:
        samples: what the step had to do on this rank.

    Raises:
        RunFailed: the other ranks did not make their first call within 15 minutes.
    """
    beat()(samples)


@functools.cache
def beat() -> Callable[[float], None]:
    """What a heartbeat does; made at the first one."""
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
    """Ends of steps on a session's clock."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps = 0

    def beat(self, samples: float) -> None:
        """The end of one."""
        self.session.clock.end_step(samples)
        self.steps += 1
        if self.steps % POLL_STEPS == 0:
            self.session.poll()

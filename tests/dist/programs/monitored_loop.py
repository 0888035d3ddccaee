"""A hand-written loop under the monitor: real exchanges; work is a timed wait or a computation.

Usage: monitored_loop.py FOLDER JSON. The JSON says which faults to inject on which ranks; see ``Script``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpctrain.comm.world import connect
from hpctrain.config.sections import MonitorConfig
from hpctrain.monitor.rank_monitor import start

USUAL = {"data": 0.001, "forward": 0.004, "backward": 0.006, "optimizer": 0.001, "callbacks": 0.001, "checkpoint": 0.0}


@dataclass(frozen=True)
class Script:
    """What to inject."""

    steps: int
    computes: bool = False
    """Work is a fixed number of operations instead of a wait."""
    slow: list[list] = field(default_factory=list)  # type: ignore[type-arg]
    """[rank, phase, extra seconds, first step, last step]"""
    exchange_delay: list[float] = field(default_factory=list)
    """[seconds, first step]: extra time of exchanges from that step on."""
    trouble: str = ""
    """stop, spin, die, stop_agent or kill_agent: what happens to rank ``victim`` at step 40."""
    victim: int = 1
    pin: bool = False
    """Pin rank r to processor r."""
    monitor: dict = field(default_factory=dict)  # type: ignore[type-arg]


def compute(seconds: float, rate: float) -> None:
    """Do as many additions as take ``seconds`` on an idle processor."""
    total = 0
    for number in range(int(seconds * rate)):
        total += number


def measured_rate() -> float:
    """Additions per second on this machine."""
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        compute(1.0, 200_000)
        best = max(best, 200_000 / (time.perf_counter() - begin))
    return best


def main() -> None:
    folder, script = Path(sys.argv[1]), Script(**json.loads(sys.argv[2]))
    world = connect()
    if script.pin:
        os.sched_setaffinity(0, {world.rank})
    rate = measured_rate() if script.computes else 0.0
    config = MonitorConfig(**{"window_steps": 16, "on_hang": "report", "host_interval_s": 1.0, **script.monitor})
    gradient, durations = np.ones(1000), []
    with start(world, folder, config) as monitor:
        clock = monitor.clock
        (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
        monitor.await_agent()

        def work(phase: str, step: int) -> None:
            seconds = USUAL[phase]
            extra = sum(s[2] for s in script.slow if s[0] == world.rank and s[1] == phase and s[3] <= step < s[4])
            with clock.phase(phase):
                if script.computes:
                    compute(seconds + extra, rate)
                else:
                    time.sleep(seconds + extra)

        for step in range(script.steps):
            begin = time.perf_counter()
            work("data", step)
            work("forward", step)
            if step == 40 and world.rank == script.victim:
                befall(script.trouble, monitor.agent.pid if monitor.agent else 0)
            work("backward", step)
            clock.arrived()
            if script.exchange_delay and step >= script.exchange_delay[1]:
                MPI.COMM_WORLD.Barrier()
                time.sleep(script.exchange_delay[0])
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient)
            clock.left()
            gradient /= world.size
            for phase in ("optimizer", "callbacks", "checkpoint"):
                work(phase, step)
            clock.end_step(32)
            durations.append(time.perf_counter() - begin)
            if step % 16 == 0:
                monitor.poll()
    if world.rank == 0:
        print(json.dumps({"durations": durations}))


def befall(trouble: str, agent: int) -> None:
    """Inject ``trouble``."""
    if trouble == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif trouble == "spin":
        endless_loop()
    elif trouble == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif trouble == "stop_agent":
        os.kill(agent, signal.SIGSTOP)
    elif trouble == "kill_agent":
        os.kill(agent, signal.SIGKILL)


def endless_loop() -> None:
    """Loop forever, like a bug in user code."""
    while True:
        pass


if __name__ == "__main__":
    main()

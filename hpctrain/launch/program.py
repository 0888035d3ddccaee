"""A program of ours on ranks of this machine, outside any run: what the doctor and benchmarks measure with."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.launch.mpi_library import MpiLibrary, MpiRun, find_mpirun, launcher_environment
from hpctrain.system import processes
from hpctrain.system.cores import usable_cores

LONGEST_POLL_S = 2.0
"""Looks at processes cost what is being measured some milliseconds."""
ENDED_S = 5.0
"""Seconds that mpirun has to end after all its ranks have. One whose ranks fail while MPI starts may wait for ever."""
KILL_S = 10.0
"""Seconds that it has to end its ranks when it is asked to, which it does not do when it is killed."""


@dataclass(frozen=True)
class Ended:
    """What a program left."""

    code: int
    output: str
    messages: str
    """On standard error."""


def on_ranks(
    words: Sequence[str], ranks: int, library: MpiLibrary | None, environment: Mapping[str, str], timeout_s: float
) -> Ended:
    """Runs a program to its end.

    Args:
        words: the program.
        ranks: how many to start.
        library: the MPI library that mpi4py links; None starts the program without mpirun, on one rank.
        environment: of the ranks; what mpirun needs is added.
        timeout_s: longest time that it may take.

    Raises:
        UserError: there is no mpirun for the library.
        subprocess.TimeoutExpired: it has not ended in time.
    """
    if library is not None:
        mpirun, cores = MpiRun(find_mpirun(library), library.flavour), usable_cores()
        environment = {**environment, **launcher_environment(mpirun.flavour, ranks > cores, os.environ)}
        words = [*mpirun.argv(ranks, {}, cores), *words]
    with (
        processes.own_session(environment) as session,
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as messages,
    ):
        launcher = subprocess.Popen(words, env=session, stdin=subprocess.DEVNULL, stdout=output, stderr=messages)
        try:
            _wait(launcher, timeout_s, has_ranks=library is not None)
        finally:
            _end(launcher)
        output.seek(0)
        messages.seek(0)
        return Ended(launcher.returncode, output.read(), messages.read())


def _wait(launcher: subprocess.Popen[bytes], timeout_s: float, has_ranks: bool) -> None:
    """Returns when the program has ended, or mpirun has outlived its ranks."""
    begin = alone_since = time.monotonic()
    has_started, pause = False, 0.05
    while (now := time.monotonic()) < alone_since + ENDED_S:
        if now > begin + timeout_s:
            raise subprocess.TimeoutExpired(launcher.args, timeout_s)
        is_alone = has_ranks and not processes.has_children(launcher.pid)
        has_started |= not is_alone
        if not (has_started and is_alone):
            alone_since = now
        try:
            launcher.wait(min(pause, max(0.0, begin + timeout_s - now)))
            return
        except subprocess.TimeoutExpired:
            pause = min(2 * pause, LONGEST_POLL_S)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.terminate()
    try:
        launcher.wait(KILL_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()

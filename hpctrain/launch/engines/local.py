"""Ranks on this machine: which mpirun, with which options and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hpctrain.comm.world import EXPECTED_RANKS
from hpctrain.config.loading import dump
from hpctrain.config.sections import Config
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.mpi_library import MpiRun, find_mpirun, launcher_environment, probe
from hpctrain.launch.supervisor import supervise
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import CONVENTION, STOP_SIGNAL
from hpctrain.run.verdict import Verdict
from hpctrain.system import python
from hpctrain.system.cores import thread_environment, threads_per_rank, usable_cores
from hpctrain.system.output import TERMINAL, quiet_environment, say, terminal_columns
from hpctrain.system.processes import TETHER


def run(config: Config, ranks: int, rank_words: Sequence[str], verbose: bool = False) -> Verdict:
    """Trains on a number of ranks of this machine, under supervision.

    Args:
        config: the run.
        ranks: how many.
        rank_words: words after ``hpctrain`` of each rank: ``["train", "run.yaml", ...]``.
        verbose: show what libraries and mpirun say.

    Raises:
        UserError: no MPI for several ranks, or the run folder is in use.
    """
    cores = usable_cores()
    mpirun = None
    if ranks > 1:
        library = probe()
        mpirun = MpiRun(find_mpirun(library), library.flavour)
    if ranks > cores:
        say(f"{ranks} ranks share {cores} cores: the run will work, slowly")
    threads = config.train.threads or threads_per_rank(cores, ranks)
    environment = rank_environment(config, ranks, threads, verbose, os.environ)
    if mpirun is not None:
        environment |= launcher_environment(mpirun.flavour, ranks > cores, os.environ)
    command = python.module("hpctrain", *rank_words)
    if config.launch.command:
        command = [*plain_command(), *config.launch.command]
    prefix = mpirun.argv(ranks, {}, cores) if mpirun is not None else []
    launch = Launch([*prefix, *command], environment, ranks, saves=not config.launch.command)
    return supervise(
        RunDir.for_config(config),
        lambda attempt: launch,
        Limits(config.launch.stop_grace_s, config.launch.max_failures),
        Attempt(ranks=ranks).under(config.parallel),
        dump(config),
        verbose,
        by_person=lambda number: True,  # on a workstation there is no scheduler
    )


def rank_environment(
    config: Config, ranks: int, threads: int, verbose: bool, given: Mapping[str, str]
) -> dict[str, str]:
    """Variables of every rank, local or in a batch job; what the user has set in ``given`` or in launch.env wins."""
    ours = {
        **thread_environment(threads, given),
        **quiet_environment(verbose, given),
        EXPECTED_RANKS: str(ranks),
        TERMINAL: str(terminal_columns(sys.stdout)),
        TETHER: "1",
        STOP_SIGNAL: f"SIG{config.launch.stop_signal}",
        CONVENTION: " ".join([config.launch.convention, *config.launch.env]),
    }
    return {**ours, **config.launch.env}


def plain_command() -> list[str]:
    """The words before a command that is not ours."""
    return python.module("hpctrain.rank.plain_command")

"""Ranks on this machine: which mpirun, with which options and environment."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain.comm.world import EXPECTED_RANKS
from hpctrain.config.loading import dump
from hpctrain.config.sections import Config
from hpctrain.errors import UserError
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.forks.forking import Forking
from hpctrain.launch.mpi_library import Flavour, MpiRun, find_mpirun, launcher_environment, probe
from hpctrain.launch.supervisor import supervise
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.folder import BEGUN_AGAIN, RunDir
from hpctrain.run.rank_environment import CONVENTION, JOB, STOP_SIGNAL
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import python
from hpctrain.system.cgroups import thread_environment, threads_per_rank, usable_cores
from hpctrain.system.output import TERMINAL, quiet_environment, say, terminal_columns
from hpctrain.system.processes import TETHER, own_folder
from hpctrain.system.quantities import size
from hpctrain.system.shared_memory import FOLDER as SHARED_MEMORY

SEGMENTS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
"""Where Open MPI 5 and 4 make files of shared memory, which ranks that are killed leave behind."""

RANK_BYTES = 2**25
"""Memory that a rank takes at least, without a framework."""


def run(
    config: Config, ranks: int, rank_words: Sequence[str], verbose: bool = False, fresh: bool = False
) -> RunVerdict:
    """Trains on a number of ranks of this machine, under supervision; a failed attempt is started again.

    Args:
        config: the run.
        ranks: how many.
        rank_words: words after ``hpctrain`` of each rank: ``["train", "run.yaml", ...]``.
        verbose: show what libraries and mpirun say.
        fresh: the first attempt that gets so far puts aside what is there.

    Raises:
        UserError: no MPI for several ranks, too many of them, or the run folder is in use.
    """
    cores, memory = usable_cores(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if ranks * RANK_BYTES > memory:
        few = f"start {memory // RANK_BYTES} or fewer here, or divide them among launch.hosts"
        raise UserError(f"{ranks} ranks do not fit into this machine's {size(memory)} of memory", few)
    mpirun = None
    if ranks > 1:
        library = probe()
        mpirun = MpiRun(find_mpirun(library), library.flavour)
    if ranks > cores:
        say(f"{ranks} ranks share {cores} cores: the run will work, slowly")
    threads = config.train.threads or threads_per_rank(cores, ranks)
    environment = rank_environment(config, ranks, threads, verbose, os.environ)
    before_mpi = {**os.environ, **environment}
    # Ranks of MPICH find mpirun by a descriptor that they inherit.
    forks = mpirun is not None and mpirun.flavour is not Flavour.HYDRA and not config.launch.command
    if mpirun is not None:
        environment |= launcher_environment(mpirun.flavour, os.environ) | temporary(environment)
    prefix = mpirun.argv(ranks, {}, cores) if mpirun is not None else []
    facts = Attempt(ranks=ranks).under(config.parallel)
    command = rank_command(config, rank_words, fresh)
    with own_folder(SHARED_MEMORY) as segments:
        environment |= {name: segments for name in SEGMENTS if segments and name not in os.environ}
        run_dir = RunDir.of(config.name, config.run_dir)
        forking = Forking(config.task, run_dir, before_mpi, segments if forks else "")

        def launch(number: int) -> Launch:
            for left in Path(segments).iterdir() if segments else ():
                with contextlib.suppress(OSError):
                    if not left.is_socket():
                        left.unlink()  # by ranks of the attempt before, which were killed
            argv = [*prefix, *forking.words(command())]
            return Launch(argv, environment, ranks, saves=not config.launch.command, parent=forking.pid)

        with contextlib.closing(forking):
            return supervised(config, launch, facts, lambda verdict: facts, verbose)


def temporary(environment: Mapping[str, str]) -> dict[str, str]:
    """TMPDIR in place of one in which nothing can be written, for which mpirun would end without saying so."""
    given = os.environ.get("TMPDIR")
    if not given or "TMPDIR" in environment or os.path.abspath(given) == (found := tempfile.gettempdir()):
        return {}
    say(f"nothing can be written in TMPDIR, {given}: {found} takes its place")
    return {"TMPDIR": found}


def rank_command(config: Config, rank_words: Sequence[str], fresh: bool) -> Callable[[], list[str]]:
    """Gives the words of each rank's process; only the first attempt that gets so far puts aside what is there."""
    run_dir = RunDir.of(config.name, config.run_dir)
    old, mark = step_folders(run_dir), begun_again(run_dir)
    has_store = config.checkpoint.tiers.store.url is not None

    def words() -> list[str]:
        if config.launch.command:
            return [*plain_command(), *config.launch.command]
        is_first = old & step_folders(run_dir) or (has_store and begun_again(run_dir) == mark)
        flags = ["--fresh"] if fresh and is_first else []
        return python.module("hpctrain", *rank_words, *flags)

    return words


def supervised(
    config: Config,
    launch: Callable[[int], Launch],
    facts: Attempt,
    again: Callable[[RunVerdict], Attempt | None],
    verbose: bool,
) -> RunVerdict:
    """A run that no scheduler supervises: every signal is a person's, unless it runs in a job. See ``supervise``."""
    limits = Limits(config.launch.stop_grace_s, config.launch.failures_allowed(in_job=False))
    run_dir = RunDir.of(config.name, config.run_dir)
    return supervise(
        run_dir,
        launch,
        limits,
        facts,
        dump(config),
        verbose,
        by_person=lambda number: JOB not in os.environ,
        again=again,
    )


def step_folders(run_dir: RunDir) -> set[tuple[str, int]]:
    """The checkpoints by name and inode: one that was put aside is no longer among them, though its name may be."""
    return {(path.name, path.stat().st_ino) for path in run_dir.checkpoints.glob("step-*")}


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


def begun_again(run_dir: RunDir) -> tuple[int, int] | None:
    """Which mark a run with ``--fresh`` and an object store has left last."""
    with contextlib.suppress(OSError):
        found = (run_dir.checkpoints / BEGUN_AGAIN).stat()
        return found.st_ino, found.st_mtime_ns
    return None

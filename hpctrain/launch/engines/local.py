"""Starts ranks on this machine: chooses mpirun, its options and the environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain.comm.launched import EXPECTED_RANKS
from hpctrain.config.loading import dump
from hpctrain.config.sections import Config
from hpctrain.errors import UserError
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.forks.forking import Forking
from hpctrain.launch.mpi_library import Flavour, MpiRun, find_mpirun, launcher_environment, probe
from hpctrain.launch.supervisor import supervise
from hpctrain.run.attempts import Attempt
from hpctrain.run.folder import BEGUN_AGAIN, RunDir
from hpctrain.run.rank_environment import CONVENTION, JOB, STOP_SIGNAL, current_job
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import python
from hpctrain.system.cgroups import thread_environment, threads_per_rank, usable_cores
from hpctrain.system.output import TERMINAL, quiet_environment, say, terminal_columns
from hpctrain.system.processes import TETHER, own_folder
from hpctrain.system.quantities import size
from hpctrain.system.shared_memory import FOLDER as SHARED_MEMORY

SEGMENTS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
"""Variables with the folder for shared-memory files of Open MPI 5 and 4, which killed ranks leave behind."""

RANK_BYTES = 2**25
"""Minimum memory of a rank, without a framework."""


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """A run that ``hpctrain run`` or a sweep wants an engine to start."""

    config: Config
    ranks: int | None
    """Total number of ranks; None if the engine is to choose it."""
    words: Sequence[str]
    """Arguments to ``hpctrain`` on each rank: ``["train", "run.yaml", ...]``."""
    verbose: bool = False
    """Show messages of libraries and launchers."""
    fresh: bool = False
    """Put existing checkpoints aside; only the first attempt that gets that far does it."""

    @property
    def run_dir(self) -> RunDir:
        """The run folder."""
        return RunDir.of(self.config.name, self.config.run_dir)


def run(asked: RunRequest) -> RunVerdict:
    """Trains on ranks of this machine (by default 1) under supervision; restarts failed attempts.

    Raises:
        UserError: no MPI for several ranks, too many ranks for the memory, or the run folder is in use.
    """
    config, ranks = asked.config, asked.ranks or 1
    cores = usable_cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
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
    environment = rank_environment(config, ranks, threads, asked.verbose, os.environ)
    before_mpi = {**os.environ, **environment}
    # Not with MPICH: its ranks find mpirun through a file descriptor that they inherit.
    forks = mpirun is not None and mpirun.flavour is not Flavour.HYDRA and not config.launch.command
    if mpirun is not None:
        environment |= launcher_environment(mpirun.flavour, os.environ) | temporary(environment)
    prefix = mpirun.argv(ranks, {}, cores) if mpirun is not None else []
    facts = Attempt(ranks=ranks).under(config.parallel)
    command = rank_command(asked)
    with own_folder(SHARED_MEMORY) as segments:
        environment |= {name: segments for name in SEGMENTS if segments and name not in os.environ}
        forking = Forking(config.task, asked.run_dir, before_mpi, segments if forks else "")

        def launch(number: int) -> Launch:
            for left in Path(segments).iterdir() if segments else ():
                with contextlib.suppress(OSError):
                    if not left.is_socket():
                        left.unlink()  # left by killed ranks of the attempt before
            argv = [*prefix, *forking.words(command())]
            return Launch(argv, environment, ranks, saves=not config.launch.command, parent=forking.pid)

        with contextlib.closing(forking):
            return supervised(asked, launch, facts, lambda verdict: facts)


def temporary(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns a replacement for a TMPDIR that cannot be written, with which mpirun would end without a message."""
    given = os.environ.get("TMPDIR")
    if not given or "TMPDIR" in environment:
        return {}
    found = tempfile.gettempdir()
    if os.path.abspath(given) == found:
        return {}
    say(f"TMPDIR is {given}, which is not writable: using {found}")
    return {"TMPDIR": found}


def rank_command(asked: RunRequest) -> Callable[[], list[str]]:
    """Returns a function that gives each rank's command for the next attempt.

    It has ``--fresh``, if asked for, until an attempt has put the existing checkpoints aside.
    """
    config, run_dir = asked.config, asked.run_dir
    old = step_folders(run_dir)
    mark = begun_again(run_dir)
    forgotten = [run_dir.saved_step] * asked.fresh
    has_store = config.checkpoint.tiers.store.url is not None

    def words() -> list[str]:
        if config.launch.command:
            while forgotten:  # the program's first attempt with --fresh
                forgotten.pop().unlink(missing_ok=True)
            return [*plain_command(), *config.launch.command]
        is_first = old & step_folders(run_dir) or (has_store and begun_again(run_dir) == mark)
        return python.module("hpctrain", *asked.words, *["--fresh"] * (asked.fresh and bool(is_first)))

    return words


def supervised(
    asked: RunRequest,
    launch: Callable[[int], Launch],
    facts: Attempt,
    again: Callable[[RunVerdict], Attempt | None],
) -> RunVerdict:
    """Runs ``supervise`` outside Slurm: signals count as a person's, unless JOB says that a scheduler sends them."""
    job, _ = current_job()
    failures = asked.config.launch.failures_allowed(in_job=False)
    return supervise(
        asked.run_dir,
        launch,
        Limits(asked.config.launch.stop_grace_s, failures, jobs=(job,) if job else ()),
        dataclasses.replace(facts, fresh=asked.fresh or None),
        dump(asked.config),
        asked.verbose,
        by_person=lambda number: JOB not in os.environ,
        again=again,
    )


def step_folders(run_dir: RunDir) -> set[tuple[str, int]]:
    """Returns the checkpoints by name and inode, so that a new one is distinguished from one put aside."""
    return {(path.name, path.stat().st_ino) for path in run_dir.checkpoints.glob("step-*")}


def rank_environment(
    config: Config, ranks: int, threads: int, verbose: bool, given: Mapping[str, str]
) -> dict[str, str]:
    """Returns environment variables for all ranks, local or in a job; ``given`` and launch.env take precedence."""
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
    """Returns the words to put before a command that does not use hpctrain."""
    return python.module("hpctrain.programs.plain_command")


def begun_again(run_dir: RunDir) -> tuple[int, int] | None:
    """Returns inode and time of the mark that a run with ``--fresh`` and an object store leaves; None without one."""
    with contextlib.suppress(OSError):
        found = (run_dir.checkpoints / BEGUN_AGAIN).stat()
        return found.st_ino, found.st_mtime_ns
    return None

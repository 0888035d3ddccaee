"""Launchers inside a Slurm job: command lines of srun and mpirun, and which of them to try. Pure."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm.job import Job
from hpctrain.launch.mpi_library import Flavour, MpiRun, launcher_environment

PREFERRED_MPI = ("pmix", "cray_shasta", "pmi2")
"""MPI types of srun, best first."""


@dataclass(frozen=True)
class Launcher(abc.ABC):
    """A way to start the ranks of a job."""

    job: Job
    """The job with the nodes that the ranks run on."""
    slurm: SlurmConfig
    again: bool = field(default=False, kw_only=True)
    """Whether a step of this job has failed. If its node is lost, that step never ends and holds cores and memory."""

    @abc.abstractmethod
    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Returns the command line that runs ``command`` on every rank, with the variables named in ``env``."""

    @abc.abstractmethod
    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Returns variables that the launcher itself needs, apart from those in ``given``."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns a name for people."""

    def after_failure(self, job: Job) -> Launcher:
        """Returns the launcher for the attempt after a failed one, on ``job`` (perhaps with fewer nodes)."""
        return replace(self, job=job, again=True)


@dataclass(frozen=True)
class Srun(Launcher):
    """Slurm's launcher, srun."""

    mpi: str | None
    """Value of --mpi; None for the site's default."""
    in_order: bool = False
    """Whether ranks must fill one node after the other, whatever the site's default is."""

    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """See Launcher. srun passes its whole environment to the ranks."""
        slurm = self.slurm
        shape = [f"--nodes={self.job.nodes}", f"--ntasks={self.job.ranks}"]
        # Without --kill-on-bad-exit, the others run until the time limit when a rank dies.
        words = ["srun", *shape, "--kill-on-bad-exit=1", "--input=none"]
        words += [f"--mpi={self.mpi}"] if self.mpi else []
        words += ["--distribution=block"] if self.in_order else []
        words += ["--overlap", "--mem=0"] if self.again else []
        words += _on(self.job)
        words += [f"--cpus-per-task={slurm.cpus_per_rank}"] if slurm.cpus_per_rank else []
        words += [f"--cpu-bind={slurm.cpu_bind}"] if slurm.cpu_bind else []
        return [*words, *slurm.srun_options, *command]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """See Launcher."""
        # Slurm's PMIx server uses a node's index in the step as an index into this list. If the step's nodes are not
        # the first ones in the list, it sends to the wrong nodes forever.
        return {"SLURM_JOB_NODELIST": ",".join(self.job.part)} if self.job.part else {}

    def describe(self) -> str:
        """See Launcher."""
        return f"srun --mpi={self.mpi}" if self.mpi else "srun"


@dataclass(frozen=True)
class Mpirun(Launcher):
    """The MPI library's mpirun, which finds the job's nodes in Slurm's variables and starts its daemons by srun."""

    program: MpiRun

    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """See Launcher."""
        job = self.job
        words = self.program.argv(job.ranks, env, cores=job.ranks, local=False)
        words += self.program.on(job.part, job.ranks // max(job.nodes, 1)) if job.part else []
        return [*words, *self.slurm.mpirun_options, *command]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """See Launcher."""
        found = launcher_environment(self.program.flavour, given, local=False)
        return found | {"SLURM_OVERLAP": "1"} if self.again else found

    def describe(self) -> str:
        """See Launcher."""
        return "mpirun"


def _on(job: Job) -> list[str]:
    return [f"--nodelist={','.join(job.part)}"] if job.part else []


def once_a_node(job: Job, command: Sequence[str], overlap: bool = False) -> list[str]:
    """Returns the command line that runs a program once on every node, without MPI, perhaps while other steps run."""
    options = [f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", *_on(job)]
    options += ["--overlap", "--mem=0", "--gres=none"] if overlap else []
    return ["srun", "--mpi=none", "--kill-on-bad-exit=1", "--input=none", *options, *command]


EMPTY_STEP = ["srun", "--mpi=none", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--input=none", "true"]
"""The command line of a step that does nothing, on one node."""


def candidates(
    launch: LaunchConfig,
    job: Job,
    offered: Sequence[str],
    mpirun: MpiRun | None,
    flavour: Flavour | None,
    in_order: bool = False,
) -> list[Launcher]:
    """Returns the launchers to try, best first; the first one whose preflight passes is used.

    Args:
        launch: section with the site profile applied.
        job: the allocation, or the part of it that ranks run on.
        offered: MPI types from ``srun --mpi=list``; empty without srun.
        mpirun: the MPI library's mpirun, if there is one.
        flavour: family of the MPI library, if there is one.
        in_order: have ranks fill one node after the other.

    Raises:
        UserError: a launcher or MPI type that the configuration asks for does not exist.
    """
    slurm = launch.slurm
    found: list[Launcher] = []
    if launch.launcher != "mpirun" and offered:
        if slurm.mpi and slurm.mpi not in offered:
            fix = f"set launch.slurm.mpi to one of {', '.join(offered)}, or launch.launcher: mpirun"
            raise UserError(f"srun has no --mpi={slurm.mpi} here", fix)
        found.append(Srun(job, slurm, slurm.mpi or best_mpi(offered, flavour), in_order))
    if launch.launcher != "srun" and mpirun is not None:
        found.append(Mpirun(job, slurm, mpirun))
    if not found:
        wanted = "srun or mpirun" if launch.launcher == "auto" else launch.launcher
        raise UserError(f"there is no {wanted} in the job", "load the module that provides it in launch.modules")
    return found


def best_mpi(offered: Sequence[str], flavour: Flavour | None) -> str | None:
    """Returns the MPI type that fits the library: PMIx for Open MPI; for MPICH's family PMI-2 works as well."""
    if flavour is None:
        return None
    wanted = PREFERRED_MPI if flavour is Flavour.HYDRA else ("pmix",)
    return next((name for name in wanted if name in offered), next((name for name in offered if "pmix" in name), None))

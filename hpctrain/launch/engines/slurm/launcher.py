"""What starts the ranks inside a job: command lines of srun and mpirun, and which of them to try. Pure."""

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
ONE_FENCE = {"OMPI_MCA_pmix_base_async_modex": "1"}
"""Open MPI 5 meets twice in MPI_Init, by Slurm's PMIx, and prepares MPI_COMM_WORLD for messages in between: on busy
nodes a rank was seen to leave early, and its first message to end one that had not prepared (SIGSEGV in
mca_pml_ob1_recv_frag_callback_match). So it prepares first, and meets once."""


@dataclass(frozen=True)
class Launcher(abc.ABC):
    """A way to start the ranks of a job."""

    job: Job
    """With the nodes that the ranks run on."""
    slurm: SlurmConfig
    again: bool = field(default=False, kw_only=True)
    """A step of this job has failed before: if its node is gone it never ends, and holds the job's cores and memory."""

    @abc.abstractmethod
    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command line that starts a program with its arguments on every rank; variables named reach the ranks."""

    @abc.abstractmethod
    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables that the launcher itself needs, if the user has not set them."""

    @abc.abstractmethod
    def describe(self) -> str:
        """For people."""

    def after_failure(self, job: Job) -> Launcher:
        """The same for another attempt in the job, or on what is left of it, after a failed one."""
        return replace(self, job=job, again=True)


@dataclass(frozen=True)
class Srun(Launcher):
    """Slurm's own."""

    mpi: str | None
    """Value of --mpi; None leaves it to the site."""
    in_order: bool = False
    """Whether ranks fill one node after the other, whatever the site does by default."""
    flavour: Flavour | None = None
    """Family of the MPI library, if there is one."""

    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """See Launcher. Its environment reaches the ranks as it is."""
        slurm, shape = self.slurm, [f"--nodes={self.job.nodes}", f"--ntasks={self.job.ranks}"]
        # Without --kill-on-bad-exit the ranks of a dead one run on to the time limit.
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
        wanted = ONE_FENCE if self.flavour is Flavour.OPEN_MPI_5 else {}
        # Slurm's PMIx server takes the nodes' numbers in the step for places in this list, and writes to other nodes
        # for ever if the step's are not the first ones of the list.
        nodes = {"SLURM_JOB_NODELIST": ",".join(self.job.part)} if self.job.part else {}
        return {name: value for name, value in wanted.items() if name not in given} | nodes

    def describe(self) -> str:
        """See Launcher."""
        return f"srun --mpi={self.mpi}" if self.mpi else "srun"


@dataclass(frozen=True)
class Mpirun(Launcher):
    """The MPI library's own, which finds the job's nodes in Slurm's variables, and starts its daemons by srun."""

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


def once_a_node(job: Job, command: Sequence[str]) -> list[str]:
    """The command line that starts a program once on every node, without MPI."""
    options = [f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", *_on(job)]
    return ["srun", "--mpi=none", "--kill-on-bad-exit=1", "--input=none", *options, *command]


def empty_step() -> list[str]:
    """The command line of a job step that does nothing, on one node."""
    return ["srun", "--mpi=none", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--input=none", "true"]


def candidates(
    launch: LaunchConfig,
    job: Job,
    offered: Sequence[str],
    mpirun: MpiRun | None,
    flavour: Flavour | None,
    in_order: bool = False,
) -> list[Launcher]:
    """Launchers worth trying, best first; the first one whose preflight passes is taken.

    Args:
        launch: with the site profile applied.
        job: the allocation, or the part of it that ranks run on.
        offered: what ``srun --mpi=list`` prints; empty without srun.
        mpirun: the MPI library's mpirun, if there is one.
        flavour: family of the MPI library, if there is one.
        in_order: ranks fill one node after the other.

    Raises:
        UserError: what the configuration asks for is not there.
    """
    slurm = launch.slurm
    found: list[Launcher] = []
    if launch.launcher != "mpirun" and offered:
        if slurm.mpi and slurm.mpi not in offered:
            raise UserError(
                f"srun has no --mpi={slurm.mpi} here",
                f"set launch.slurm.mpi to one of {', '.join(offered)}, or launch.launcher: mpirun",
            )
        found.append(Srun(job, slurm, slurm.mpi or best_mpi(offered, flavour), in_order, flavour))
    if launch.launcher != "srun" and mpirun is not None:
        found.append(Mpirun(job, slurm, mpirun))
    if not found:
        wanted = "srun or mpirun" if launch.launcher == "auto" else launch.launcher
        raise UserError(f"there is no {wanted} in the job", "load the module that brings it in launch.modules")
    return found


def best_mpi(offered: Sequence[str], flavour: Flavour | None) -> str | None:
    """The MPI type that fits the library: Open MPI 5 takes PMIx only, MPICH's family PMI-2 as well."""
    if flavour is None:
        return None
    wanted = PREFERRED_MPI if flavour is Flavour.HYDRA else ("pmix",)
    return next((name for name in wanted if name in offered), next((name for name in offered if "pmix" in name), None))

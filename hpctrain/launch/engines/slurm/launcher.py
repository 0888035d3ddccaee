"""What starts the ranks inside a job: command lines of srun and mpirun, and which of them to try. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.errors import UserError
from hpctrain.launch.mpi_library import Flavour, MpiRun, launcher_environment

PREFERRED_MPI = ("pmix", "cray_shasta", "pmi2")
"""MPI types of srun, best first."""
ONE_FENCE = {"OMPI_MCA_pmix_base_async_modex": "1"}
"""Open MPI 5 meets twice in MPI_Init, by Slurm's PMIx, and prepares MPI_COMM_WORLD for messages in between: on busy
nodes a rank was seen to leave early, and its first message to end one that had not prepared (SIGSEGV in
mca_pml_ob1_recv_frag_callback_match). So it prepares first, and meets once."""


class Launcher(Protocol):
    """A way to start the ranks of a job."""

    @property
    def ranks(self) -> int:
        """How many it starts."""

    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command line that starts a program with its arguments on every rank; variables named reach the ranks."""

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables that the launcher itself needs, if the user has not set them."""

    def describe(self) -> str:
        """For people."""


@dataclass(frozen=True)
class Srun:
    """Slurm's own."""

    nodes: int
    ranks: int
    slurm: SlurmConfig
    mpi: str | None
    """Value of --mpi; None leaves it to the site."""
    in_order: bool = False
    """Whether ranks fill one node after the other, whatever the site does by default."""
    flavour: Flavour | None = None
    """Family of the MPI library, if there is one."""

    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """See Launcher. Its environment reaches the ranks as it is."""
        slurm = self.slurm
        # Without --kill-on-bad-exit the ranks of a dead one run on to the time limit.
        words = ["srun", f"--nodes={self.nodes}", f"--ntasks={self.ranks}", "--kill-on-bad-exit=1", "--input=none"]
        words += [f"--mpi={self.mpi}"] if self.mpi else []
        words += ["--distribution=block"] if self.in_order else []
        words += [f"--cpus-per-task={slurm.cpus_per_rank}"] if slurm.cpus_per_rank else []
        words += [f"--cpu-bind={slurm.cpu_bind}"] if slurm.cpu_bind else []
        return [*words, *slurm.srun_options, *command]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """See Launcher."""
        wanted = ONE_FENCE if self.flavour is Flavour.OPEN_MPI_5 else {}
        return {name: value for name, value in wanted.items() if name not in given}

    def describe(self) -> str:
        """See Launcher."""
        return f"srun --mpi={self.mpi}" if self.mpi else "srun"


@dataclass(frozen=True)
class Mpirun:
    """The MPI library's own, which finds the job's nodes in Slurm's variables."""

    nodes: int
    ranks: int
    slurm: SlurmConfig
    program: MpiRun

    def words(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """See Launcher."""
        words = self.program.argv(self.ranks, env, cores=self.ranks, local=False)
        return [*words, *self.slurm.mpirun_options, *command]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """See Launcher."""
        return launcher_environment(self.program.flavour, False, given, local=False)

    def describe(self) -> str:
        """See Launcher."""
        return "mpirun"


def once_a_node(nodes: int, command: Sequence[str]) -> list[str]:
    """The command line that starts a program once on every node, without MPI."""
    options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    return ["srun", "--mpi=none", "--kill-on-bad-exit=1", "--input=none", *options, *command]


def empty_step() -> list[str]:
    """The command line of a job step that does nothing, on one node."""
    return ["srun", "--mpi=none", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--input=none", "true"]


def candidates(
    launch: LaunchConfig,
    nodes: int,
    ranks: int,
    offered: Sequence[str],
    mpirun: MpiRun | None,
    flavour: Flavour | None,
    in_order: bool = False,
) -> list[Launcher]:
    """Launchers worth trying, best first; the first one whose preflight passes is taken.

    Args:
        launch: with the site profile applied.
        nodes: nodes of the job.
        ranks: ranks of the job.
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
        found.append(Srun(nodes, ranks, slurm, slurm.mpi or best_mpi(offered, flavour), in_order, flavour))
    if launch.launcher != "srun" and mpirun is not None:
        found.append(Mpirun(nodes, ranks, slurm, mpirun))
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

"""What starts the ranks inside a job: command lines of srun and mpirun, and which of them to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.config import LaunchConfig
from hpctrain.errors import UserError

Kind = Literal["srun", "mpirun"]

PREFERRED_MPI = ("pmix", "cray_shasta", "pmi2")
"""MPI types of srun, best first. Open MPI 5 takes PMIx only; MPICH, Intel MPI and Cray's take PMI-2."""


@dataclass(frozen=True)
class Launcher:
    """A way to start the ranks of a job."""

    kind: Kind
    mpi: str | None
    """srun's MPI type; None leaves it to the site."""
    nodes: int
    ranks: int
    cpus_per_rank: int | None
    cpu_bind: str | None
    options: tuple[str, ...]
    wrap: tuple[str, ...]
    """Words before each rank's command."""

    def words(self, command: Sequence[str], env: Mapping[str, str], wait_s: int = 60) -> list[str]:
        """The command line that starts ``command`` on every rank.

        Args:
            command: program and arguments of a rank.
            env: variables that must reach the ranks; the caller also sets them for the launcher itself.
            wait_s: seconds after the first rank's end at which srun ends the others.
        """
        if self.kind == "srun":
            return ["srun", *self._srun(wait_s), *self.options, *self.wrap, *command]
        return ["mpirun", *self._mpirun(env), *self.options, *self.wrap, *command]

    def once_a_node(self, command: Sequence[str]) -> list[str]:
        """The command line that starts ``command`` once on every node, without MPI."""
        return ["srun", "--overlap", "--mpi=none", f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1",
                "--cpus-per-task=1", "--kill-on-bad-exit=1", "--input=none", *command]  # fmt: skip

    def describe(self) -> str:
        """For people."""
        return f"srun --mpi={self.mpi}" if self.kind == "srun" and self.mpi else self.kind

    def _srun(self, wait_s: int) -> list[str]:
        words = [f"--nodes={self.nodes}", f"--ntasks={self.ranks}", "--kill-on-bad-exit=1", f"--wait={wait_s}", "--input=none"]
        words += [f"--mpi={self.mpi}"] if self.mpi else []
        words += [f"--cpus-per-task={self.cpus_per_rank}"] if self.cpus_per_rank else []
        words += [f"--cpu-bind={self.cpu_bind}"] if self.cpu_bind else []
        return words

    def _mpirun(self, env: Mapping[str, str]) -> list[str]:
        # Open MPI binds each rank to one core by default: loaders and Horovod's thread would share it.
        words = ["-n", str(self.ranks), "--bind-to", "none", "--map-by", "slot"]
        return words + [word for name in sorted(env) for word in ("-x", name)]


def candidates(
    launch: LaunchConfig, nodes: int, ranks: int, offered: Sequence[str], mpirun: bool, exported: bool = True
) -> list[Launcher]:
    """Launchers worth trying, best first; the first one whose preflight passes is taken.

    Args:
        launch: with the site profile applied.
        nodes: nodes of the job.
        ranks: ranks of the job.
        offered: what ``srun --mpi=list`` prints; empty without srun.
        mpirun: whether mpirun is on PATH.

    Raises:
        UserError: what the configuration asks for is not there.
    """
    slurm = launch.slurm
    common = {"nodes": nodes, "ranks": ranks, "cpus_per_rank": slurm.cpus_per_rank, "cpu_bind": slurm.cpu_bind, "wrap": slurm.wrap}
    found = []
    if launch.launcher != "mpirun" and offered:
        if slurm.mpi and slurm.mpi not in offered:
            raise UserError(f"srun has no --mpi={slurm.mpi} here", f"set launch.slurm.mpi to one of {', '.join(offered)}, or launch.launcher: mpirun")
        types: list[str | None] = [slurm.mpi] if slurm.mpi else [name for name in PREFERRED_MPI if name in offered][:1] or [None]  # type: ignore[assignment]
        found += [Launcher("srun", mpi, options=slurm.srun_options, **common) for mpi in types]  # type: ignore[arg-type]
    if launch.launcher != "srun" and mpirun:
        found.append(Launcher("mpirun", None, options=slurm.mpirun_options, **common))  # type: ignore[arg-type]
    if not found:
        wanted = "srun or mpirun" if launch.launcher == "auto" else launch.launcher
        raise UserError(f"{wanted} is not on PATH in the job", "load the module that brings it in launch.modules, or change launch.launcher")
    return found

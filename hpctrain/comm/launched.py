"""Variables in which launchers tell a process of its ranks, and those with which MPI starts quickly. Needs no NumPy."""

from __future__ import annotations

from collections.abc import Mapping

EXPECTED_RANKS = "HPCTRAIN_EXPECTED_RANKS"
SRUN_TASKS = "SLURM_STEP_NUM_TASKS"
"""Variable in which srun passes the number of processes that it started."""
QUICK_START = {"OMPI_MCA_btl": "^ofi"}
"""Skips Open MPI's one-sided transport over libfabric, useless on one machine, which delays start-up by a second."""
ALONE_START = {"OMPI_MCA_btl": "^ofi,sm,vader"}
"""For a process without peers: keeps Open MPI 5 from leaving a file in /dev/shm on each start."""
LAUNCHED = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables in which launchers pass the rank. Under mpirun, SLURM_PROCID is that of the daemon, so it comes last."""


def launched_rank(environ: Mapping[str, str]) -> int | None:
    """Returns the rank from the launcher's variables: 0 without a launcher, None if it is not a number."""
    found = next((environ[name] for name in LAUNCHED if environ.get(name)), "0")
    return int(found) if found.isdigit() else None

"""Launchers: which are tried, and their command lines. Jobs: what their environment says."""

from __future__ import annotations

import pytest

from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm.job import Job, current
from hpctrain.launch.engines.slurm.launcher import best_mpi, candidates, once_a_node
from hpctrain.launch.mpi_library import Flavour, MpiRun

JOB = Job("7", nodes=2, ranks=4, restarts=0, nodelist="n[1-2]")
MPIRUN = MpiRun("/mpi/bin/mpirun", Flavour.OPEN_MPI_5)


def kinds(
    launcher: str = "auto",
    offered: tuple[str, ...] = ("none", "pmi2", "pmix"),
    mpirun: MpiRun | None = MPIRUN,
    **slurm: str,
) -> list[str]:
    """What is tried."""
    launch = LaunchConfig(launcher=launcher, slurm=SlurmConfig(**slurm))  # type: ignore[arg-type]
    flavour = mpirun.flavour if mpirun else None
    return [each.describe() for each in candidates(launch, JOB, offered, mpirun, flavour)]


def test_srun_comes_first_where_it_is_there():
    assert kinds() == ["srun --mpi=pmix", "mpirun"]
    assert kinds(offered=()) == ["mpirun"]
    assert kinds(mpirun=None) == ["srun"]
    assert kinds("mpirun") == ["mpirun"]
    assert kinds("srun", mpi="pmi2") == ["srun --mpi=pmi2"]


@pytest.mark.parametrize(
    ("flavour", "offered", "expected"),
    [
        (Flavour.OPEN_MPI_5, ("pmi2", "pmix"), "pmix"),
        (Flavour.OPEN_MPI_5, ("pmi2", "pmix_v4"), "pmix_v4"),
        (Flavour.OPEN_MPI_5, ("pmi2", "none"), None),
        (Flavour.HYDRA, ("pmi2", "none"), "pmi2"),
        (Flavour.HYDRA, ("pmi2", "cray_shasta"), "cray_shasta"),
        (None, ("pmix",), None),
    ],
)
def test_the_mpi_type_fits_the_library(flavour, offered, expected):
    assert best_mpi(offered, flavour) == expected


@pytest.mark.parametrize("flavour", [*Flavour, None])
def test_srun_changes_nothing_about_how_open_mpi_starts(flavour):
    """``pmix_base_async_modex`` hung one of 22 starts in MPI_Comm_dup; the crash it avoided is rarer, and seen."""
    [srun] = candidates(LaunchConfig(launcher="srun"), JOB, ("pmix",), MPIRUN, flavour)
    assert srun.environment({}) == {}
    others = srun.after_failure(srun.job.on(["n1", "n3"])).environment({"SLURM_JOB_NODELIST": "n[1-3]"})
    assert others == {"SLURM_JOB_NODELIST": "n1,n3"}


@pytest.mark.parametrize(
    "wrong", [{"mpi": "pmixx"}, {"offered": (), "mpirun": None}, {"launcher": "srun", "offered": ()}]
)
def test_what_is_not_there_is_said(wrong):  # type: ignore[type-arg]
    with pytest.raises(UserError):
        kinds(**wrong)


def test_command_lines():
    slurm = SlurmConfig(
        mpi="pmix", cpu_bind="none", cpus_per_rank=3, srun_options=("--label",), mpirun_options=("--tag",)
    )
    srun, mpirun = candidates(LaunchConfig(slurm=slurm), JOB, ("pmix",), MPIRUN, MPIRUN.flavour)
    words = srun.words(["prog", "my arg"], {"A": "1"})
    assert words[0] == "srun" and words[-3:] == ["--label", "prog", "my arg"]
    assert {
        "--nodes=2",
        "--ntasks=4",
        "--mpi=pmix",
        "--cpu-bind=none",
        "--cpus-per-task=3",
        "--kill-on-bad-exit=1",
    } <= set(words)
    words = mpirun.words(["prog"], {"A": "1", "B": "2"})
    assert words[:3] == ["/mpi/bin/mpirun", "-n", "4"] and words[-2:] == ["--tag", "prog"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "-x"] == ["A", "B"]
    assert "--ntasks-per-node=1" in once_a_node(JOB, ["x"])


def test_a_job_from_its_environment():
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }
    assert current(environ) == Job("7", 2, 4, 0, "n[1-2]")
    array = {
        **environ,
        "SLURM_ARRAY_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_NTASKS": "3",
    }
    assert current(array) == Job("5_3", 2, 3, 2, "n[1-2]")
    assert current({}) is None


@pytest.mark.parametrize(("text", "expected"), [("2(x3),1", 7), ("4", 4), ("1,2(x2)", 5), ("", 2)])
def test_ranks_of_uneven_nodes(text, expected):
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": text}
    made = current(environ)
    assert made is not None and made.ranks == expected


def test_ranks_that_share_out_layers_fill_one_node_after_the_other():
    for in_order in (True, False):
        srun, _ = candidates(LaunchConfig(), JOB, ("pmix",), MPIRUN, MPIRUN.flavour, in_order)
        assert ("--distribution=block" in srun.words(["prog"], {})) == in_order

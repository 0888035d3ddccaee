"""Which mpirun, how many threads, what environment."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpctrain.config.sections import CheckpointConfig, Config, LaunchConfig, StoreTierConfig, TiersConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines import local
from hpctrain.launch.engines.local import RunRequest, rank_command, rank_environment, run, temporary
from hpctrain.launch.mpi_library import (
    Flavour,
    MpiLibrary,
    MpiRun,
    find_mpirun,
    flavour_of,
    launcher_environment,
    probe,
    short,
)
from hpctrain.launch.nested_launcher import refuse_launcher
from hpctrain.run.attempts import Attempt
from hpctrain.run.folder import BEGUN_AGAIN, RunDir
from hpctrain.system.cgroups import thread_environment, threads_per_rank
from tests.support.programs import write_programs


def test_more_ranks_than_the_memory_holds_are_refused():
    """``-n 100000``, by mistake, kept the machine busy for minutes."""
    with pytest.raises(UserError, match="1000000 ranks do not fit into this machine's"):
        config = Config(name="x", task="m:f", train=TrainConfig(epochs=1, global_batch=10))
        run(RunRequest(config, 1_000_000, ["train"]))


@pytest.mark.parametrize(
    ("text", "flavour"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost", Flavour.OPEN_MPI_5),
        ("Open MPI v4.1.4, package: Debian OpenMPI", Flavour.OPEN_MPI_4),
        ("mpirun (Open MPI) 4.1.4", Flavour.OPEN_MPI_4),
        ("mpirun (Open MPI) 5.0.11", Flavour.OPEN_MPI_5),
        ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi", Flavour.HYDRA),
        ("HYDRA build details:\n    Version: 5.0.2", Flavour.HYDRA),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", Flavour.HYDRA),
    ],
)
def test_families_of_mpi_are_known_by_what_they_say(text, flavour):
    assert flavour_of(text) is flavour


def test_an_mpi_that_does_not_load_is_said(monkeypatch):
    def hangs(*words, timeout, **more):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr("hpctrain.launch.mpi_library.subprocess.run", hangs)
    with pytest.raises(UserError, match="not loaded within 120 s"):
        probe()


def test_no_ranks_are_none(tmp_path, cli):
    (tmp_path / "run.yaml").write_text(f'name: r\nrun_dir: {tmp_path}/run\nlaunch: {{command: ["true"]}}\n')
    assert "start 1 rank or more" in cli("run", "-n", "0", tmp_path / "run.yaml", code=64).err
    assert not (tmp_path / "run").exists()


def test_an_unknown_mpi_is_said():
    with pytest.raises(UserError, match="unknown MPI library: Foo"):
        flavour_of("Foo 1.0")


def test_versions_are_shortened_for_people():
    assert short("Open MPI v5.0.11, package: x, ident: 5") == "Open MPI v5.0.11"
    assert short("MPICH Version:      5.0.2\nMPICH Device:       ch4:ofi\n") == "MPICH 5.0.2 (ch4:ofi)"


def fake_mpirun(folder: Path, says: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_programs(folder, mpirun=f"echo '{says}'")
    return str(folder / "mpirun")


def test_the_mpirun_beside_the_library_is_taken_and_others_are_refused(tmp_path, monkeypatch):
    other = fake_mpirun(tmp_path / "other", "mpirun (Open MPI) 4.1.4")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    library = MpiLibrary("MPICH 5.0.2", str(tmp_path / "mpich" / "lib" / "libmpi.so.12"), Flavour.HYDRA)
    with pytest.raises(UserError, match=r"no mpirun for MPICH 5\.0\.2") as error:
        find_mpirun(library)
    assert other in error.value.what
    own = fake_mpirun(tmp_path / "mpich" / "bin", "HYDRA build details:")
    assert find_mpirun(library) == own


def test_oversubscription_is_said_in_each_familys_words():
    def words(flavour, ranks):
        return MpiRun("mpirun", flavour).argv(ranks, {}, cores=2)

    assert words(Flavour.OPEN_MPI_5, 2) == ["mpirun", "-n", "2", "--bind-to", "none", "--host", "localhost:2"]
    assert words(Flavour.OPEN_MPI_5, 4)[-2:] == ["--map-by", "slot:OVERSUBSCRIBE"]
    assert words(Flavour.OPEN_MPI_4, 4)[-1] == "--oversubscribe"
    assert "OVERSUBSCRIBE" not in " ".join(words(Flavour.HYDRA, 4))


def test_the_environment_travels_to_other_hosts_by_name():
    env = {"B": "2", "A": "1 2"}
    assert MpiRun("m", Flavour.OPEN_MPI_4).argv(2, env, 2, local=False)[-4:] == ["-x", "A", "-x", "B"]
    assert MpiRun("m", Flavour.HYDRA).argv(2, env, 2, local=False)[-2:] == ["-genvlist", "A,B"]


@pytest.mark.parametrize(("flavour", "of"), [(Flavour.OPEN_MPI_4, "OMPI_MCA"), (Flavour.OPEN_MPI_5, "PRTE_MCA")])
def test_variables_of_a_job_do_not_decide_where_the_ranks_of_one_machine_start(flavour, of):
    found = launcher_environment(flavour, {})
    for part in ("ras", "plm"):
        assert {"slurm", "tm", "lsf"} <= set(found[f"{of}_{part}"].removeprefix("^").split(","))
    assert not any("_ras" in name for name in launcher_environment(flavour, {}, local=False))


@pytest.mark.parametrize(
    ("command", "ranks", "launcher"),
    [
        (("torchrun", "train.py"), 2, "torchrun"),
        (("/opt/bin/mpirun", "-n", "2", "x"), 2, "mpirun"),
        (("python", "-m", "torch.distributed.run", "train.py"), 4, "torch.distributed.run"),
        (("torchrun", "train.py"), 1, None),
        (("torchrun", "--nnodes=2", "train.py"), 2, None),
        (("accelerate", "launch", "--num_machines", "2", "train.py"), 2, None),
        (("python", "train.py", "--launcher", "srun"), 2, None),
    ],
)
def test_a_launcher_that_each_rank_would_start_is_refused(command, ranks, launcher):
    if launcher is None:
        refuse_launcher(command, ranks)
        return
    with pytest.raises(UserError, match=f"begins with {launcher}, which each of {ranks} ranks would start"):
        refuse_launcher(command, ranks)


def test_what_the_user_has_set_stays():
    assert "OMPI_MCA_mpi_yield_when_idle" in launcher_environment(Flavour.OPEN_MPI_5, {})
    given = {"OMPI_MCA_mpi_yield_when_idle": "0"}
    assert "OMPI_MCA_mpi_yield_when_idle" not in launcher_environment(Flavour.OPEN_MPI_5, given)
    assert launcher_environment(Flavour.HYDRA, {}) == {}
    assert launcher_environment(Flavour.OPEN_MPI_5, {})["OMPI_MCA_btl"] == "^ofi"
    assert "OMPI_MCA_btl" not in launcher_environment(Flavour.OPEN_MPI_5, {"OMPI_MCA_btl": "tcp,self"})
    away = launcher_environment(Flavour.OPEN_MPI_5, {}, local=False)
    assert not {"OMPI_MCA_btl", "OMPI_MCA_mpi_yield_when_idle"} & away.keys()
    crowded = launcher_environment(Flavour.OPEN_MPI_5, {}, local=False, oversubscribed=True)
    assert crowded["OMPI_MCA_mpi_yield_when_idle"] == "1"


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 1, 2), (2, 2, 1), (2, 4, 1), (8, 2, 3), (64, 4, 15), (4, 1, 3)]
)
def test_cores_are_shared_and_large_shares_leave_one_to_the_helpers(cores, ranks, threads):
    assert threads_per_rank(cores, ranks) == threads


def test_threads_that_the_user_has_set_stay():
    assert "OMP_NUM_THREADS" not in thread_environment(3, {"OMP_NUM_THREADS": "7"})
    assert thread_environment(3, {})["MKL_NUM_THREADS"] == "3"
    assert "GOMP_SPINCOUNT" in thread_environment(3, {})
    assert "GOMP_SPINCOUNT" not in thread_environment(3, {"OMP_WAIT_POLICY": "active"})


def test_ranks_know_how_many_they_should_be():
    train = TrainConfig(steps=1, global_batch=1)
    config = Config("a", "m:f", train, launch=LaunchConfig(env={"MINE": "x", "OMP_NUM_THREADS": "5"}))
    env = rank_environment(config, 3, 2, verbose=False, given={})
    assert (env["HPCTRAIN_EXPECTED_RANKS"], env["MINE"], env["OMP_NUM_THREADS"]) == ("3", "x", "5")
    assert env["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert "TF_CPP_MIN_LOG_LEVEL" not in rank_environment(config, 3, 2, verbose=True, given={})


def test_a_fresh_run_leaves_the_checkpoints_of_a_store_once(tmp_path):
    tiers = TiersConfig(store=StoreTierConfig(f"file://{tmp_path}/store"))
    train = TrainConfig(steps=1, global_batch=1)
    config = Config("a", "a:b", train, run_dir=str(tmp_path / "run"), checkpoint=CheckpointConfig(tiers=tiers))
    asked = RunRequest(config, 1, ["train", "a.yaml"], fresh=True)
    words = rank_command(asked)
    assert words()[-1] == "--fresh"
    assert words()[-1] == "--fresh", "the first attempt did not get so far"
    mark = RunDir.of(config.name, config.run_dir).checkpoints / BEGUN_AGAIN
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert words()[-1] == "a.yaml"
    assert rank_command(asked)()[-1] == "--fresh"
    assert rank_command(dataclasses.replace(asked, fresh=False))()[-1] == "a.yaml"


def test_a_folder_of_temporary_files_that_cannot_be_written_is_replaced(tmp_path, monkeypatch, capsys):
    """mpirun ended without a reason."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what gettempdir has found
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert temporary({}) == {} and capsys.readouterr().err == ""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    assert temporary({"TMPDIR": "of launch.env"}) == {}
    assert temporary({}) == {"TMPDIR": str(tmp_path)}
    assert "which is not writable: using" in capsys.readouterr().err


def test_only_the_first_attempt_with_fresh_begins_the_run_again(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(local, "supervise", lambda run_dir, launch, limits, facts, *rest, **more: given.append(facts))
    config = Config(name="r", task="m:f", run_dir=str(tmp_path), train=TrainConfig(steps=1, global_batch=2))
    facts = Attempt(ranks=2)
    for fresh in (True, False):
        local.supervised(RunRequest(config, 2, [], fresh=fresh), lambda number: None, facts, lambda verdict: facts)
    assert [each.to_json().get("fresh") for each in given] == [True, None] and facts.fresh is None

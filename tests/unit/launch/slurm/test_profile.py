"""Profiles: their layers, their checks, and the ones that come with the package."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from hpctrain.config.sections import LaunchConfig, SlurmConfig
from hpctrain.errors import UserError
from hpctrain.launch.engines.slurm import FILES, profile

BUILT_IN = sorted((FILES / "profiles").glob("*.toml"))


def site(folder: Path, text: str, name: str = "site.toml") -> Path:
    """A site's folder with one file."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_layers_lie_over_each_other(tmp_path):
    site(tmp_path, '[launch.slurm]\npartition = "named"\nqos = "named"\nmpi = "pmi2"\n', "profiles/mine.toml")
    site(tmp_path, '[launch]\nmodules = ["gcc"]\n[launch.slurm]\nqos = "site"\nextra = ["--nice=1"]\n')
    given = LaunchConfig(modules=("mpi",), slurm=SlurmConfig(profile="mine", mpi="pmix", extra=("--hold",)))
    made = profile.resolve(given, tmp_path)
    assert (made.slurm.partition, made.slurm.qos, made.slurm.mpi) == ("named", "site", "pmix")
    assert made.modules == ("gcc", "mpi"), "lists add up"
    assert made.slurm.extra == ("--nice=1", "--hold")
    assert made.slurm.time == "01:00:00", "from the built-in generic profile"


def test_a_mapping_is_merged_and_the_run_file_wins(tmp_path):
    site(tmp_path, '[launch.env]\nA = "site"\nB = "site"\n')
    assert profile.resolve(LaunchConfig(env={"A": "mine"}), tmp_path).env == {"A": "mine", "B": "site"}


def test_applying_twice_changes_nothing(tmp_path):
    site(tmp_path, '[launch.slurm]\nextra = ["--nice=1"]\n')
    once = profile.resolve(LaunchConfig(), tmp_path)
    assert profile.resolve(once, tmp_path) == once


def test_a_false_in_the_run_file_is_given(tmp_path):
    site(tmp_path, "[launch.slurm]\nrequeue = true\nexclusive = true\n")
    made = profile.resolve(LaunchConfig(slurm=SlurmConfig(requeue=False)), tmp_path)
    assert (made.slurm.requeue, made.slurm.exclusive) == (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[launch.slurm]\npartitoin = "x"\n', r"(?s)launch.slurm.partitoin.*did you mean partition\?"),
        ("[launch.slurm]\npartition = 3.5\n", "cannot be 3.5"),
        ("[launch.slurm]\nextra = [1.5]\n", "give a list of text"),
        ('[launch.slurm]\ngpus_per_node = "4"\n', "give an integer"),
        ('[launch]\nlauncher = "ssh"\n', "auto, srun, mpirun"),
        ("[slurm]\n", r"has the key 'slurm'"),
        ("[launch]\nslurm = 3\n", "is not a table"),
        ("launch = ", "is not TOML"),
        ("[launch]\nnodes = 4\n", "not something that a profile can set"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        profile.resolve(LaunchConfig(), site(tmp_path, text))
    assert __import__("re").search(message, str(caught.value)), str(caught.value)


def test_an_unknown_profile_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"(?s)no Slurm profile 'genric'.*did you mean generic\?"):
        profile.resolve(LaunchConfig(slurm=SlurmConfig(profile="genric")), tmp_path)


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda path: path.stem)
def test_built_in_profiles_are_sound(path, tmp_path):
    about = tomllib.loads(path.read_text())
    assert about["description"]
    assert about.get("verified", False) == (path.stem in ("generic", "local-test")), "what nobody has tried says so"
    made = profile.resolve(LaunchConfig(slurm=SlurmConfig(profile=path.stem)), tmp_path)
    assert dataclasses.is_dataclass(made)


def test_masks_of_a_profile_give_each_rank_the_cores_that_it_counts_on(tmp_path):
    made = profile.resolve(LaunchConfig(slurm=SlurmConfig(profile="example-gpu-slingshot")), tmp_path).slurm
    kind, _, masks = str(made.cpu_bind).partition(":")
    cores = [[core for core in range(64) if int(mask, 16) >> core & 1] for mask in masks.split(",")]
    assert kind == "mask_cpu"
    assert cores == [list(range(first, first + 7)) for first in (49, 57, 17, 25)]
    assert (made.gpus_per_node, made.cpus_per_rank) == (len(cores), 7)

"""The package as `pip install .` delivers it, and its metadata."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.install import ROOT, build_wheel, pip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hpctrain installed from its wheel."""
    target = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    pip(Path(sys.executable), "install", "--no-deps", "--target", target, wheel)
    return target


def run_installed(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *command], env=env, cwd=installed.parent, capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
def test_the_installed_command_works(installed):
    done = run_installed(installed, "-m", "hpctrain", "--help")
    assert done.returncode == 0, done.stderr
    assert "submit" in done.stdout


@pytest.mark.slow
def test_the_wheel_carries_every_template_and_profile(installed):
    done = run_installed(installed, "-c", "from hpctrain.launch.engines.slurm import FILES; print(FILES)")
    assert Path(done.stdout.strip()).is_relative_to(installed), "another hpctrain was imported"
    carried = {path.relative_to(done.stdout.strip()) for path in Path(done.stdout.strip()).rglob("*") if path.is_file()}
    ours = {path.relative_to(ROOT / "slurm") for path in (ROOT / "slurm").rglob("*") if path.is_file()}
    assert ours and ours - carried == set()


@pytest.mark.slow
def test_the_wheel_carries_what_init_copies(installed):
    ours = {path.name for path in (ROOT / "examples/starters").glob("*.py")}
    assert ours and ours == {path.name for path in (installed / "hpctrain/commands/starters").glob("*.py")}


@pytest.mark.slow
def test_the_wheel_carries_every_module_and_data_file(installed):
    def files(root):
        listed = (path.relative_to(root) for path in (root / "hpctrain").rglob("*") if path.is_file())
        return {path for path in listed if path.suffix != ".pyc"}

    assert files(ROOT) - files(installed) == set()


@pytest.mark.slow
def test_the_wheel_carries_neither_benchmarks_nor_tests(installed):
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} <= {"hpctrain", "bin"}


def requirements() -> list[tuple[str, str]]:
    """(extra, requirement) of setup.cfg; the core's extra is ""."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return [(extra, line) for extra, lines in listed.items() for line in lines.splitlines() if line.strip()]


def test_every_requirement_is_pinned_for_development():
    def plain(name):
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {plain(line.split("==")[0]) for line in (ROOT / "env/constraints.txt").read_text().splitlines()}
    wanted = {plain(re.split(r"[\[<>=~ ]", line)[0]) for _, line in requirements()}
    assert wanted - pinned - {"hpctrain"} == set()


def test_no_extra_pulls_in_horovod():
    """pip would build its sdist unchanged, and fail after minutes."""
    assert not [line for _, line in requirements() if line.startswith("horovod")]


def test_all_names_every_extra_but_those_of_developers_and_of_one_kind_of_machine():
    left_out = {"", "all", "dev", "docs", "nvidia"}  # nvidia needs its driver
    extras = {extra for extra, _ in requirements()} - left_out
    named = next(line for extra, line in requirements() if extra == "all")
    assert set(named[named.index("[") + 1 : -1].split(",")) == extras

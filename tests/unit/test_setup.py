"""env/setup.sh says in one sentence what is missing, before it spends minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH of links to what this machine has; a test takes programs away or puts others in their place."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in ("/usr/bin", "/bin", "/usr/local/bin"):
        for program in Path(place).iterdir():
            if not (folder / program.name).exists() and not program.name.startswith(("mpi", "python")):
                (folder / program.name).symlink_to(program)
    return folder


def replace(program: Path, script: str) -> None:
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def set_up(programs: Path, venv: Path, **env: str) -> subprocess.CompletedProcess[str]:
    python = getattr(sys, "_base_executable", sys.executable)
    wanted = {"PATH": str(programs), "HOME": os.environ["HOME"], "VENV": str(venv), "PYTHON": python} | env
    return subprocess.run(
        [shutil.which("bash"), ROOT / "env/setup.sh"], env=wanted, capture_output=True, text=True, timeout=60
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 64, done.stdout + done.stderr
    assert done.stderr.startswith("set-up: ") and len(done.stderr.splitlines()) == 2, done.stderr
    for word in (*words, "  fix: "):
        assert word in done.stderr


def test_no_compiler(programs, tmp_path):
    (programs / "g++").unlink()
    assert_refused(set_up(programs, tmp_path / "venv"), "g++ is not on PATH", "g++ 11 or newer")
    assert not (tmp_path / "venv").exists()


def test_a_compiler_that_is_too_old(programs, tmp_path):
    replace(programs / "g++", '[ "$1" = --version ] && echo "g++ 9.4.0" && exit 0; exit 1')
    assert_refused(set_up(programs, tmp_path / "venv"), "g++ 9.4.0 does not compile C++20")


def test_no_make(programs, tmp_path):
    (programs / "make").unlink()
    assert_refused(set_up(programs, tmp_path / "venv"), "make is not on PATH")


def test_a_python_with_a_space_in_its_path(programs, tmp_path):
    folder = tmp_path / "my python"
    folder.mkdir()
    replace(folder / "python3", "exit 1")
    assert_refused(set_up(programs, tmp_path / "venv", PYTHON=str(folder / "python3")), f"tried {folder}/python3")
    (programs / "make").unlink()
    replace(folder / "python3", "exit 0")
    assert_refused(set_up(programs, tmp_path / "venv", PYTHON=str(folder / "python3")), "make is not on PATH")


def test_a_python_that_is_too_old(programs, tmp_path):
    replace(programs / "python3.8", "exit 1")  # it is asked for its version by a program it cannot run
    assert_refused(set_up(programs, tmp_path / "venv", PYTHON="python3.8"), "no usable Python", "3.11 to 3.13")


def test_too_little_disk(programs, tmp_path):
    replace(programs / "df", 'echo head; echo /dev/x 9000 8000 500 90% /; echo "$2" >&2')
    done = set_up(programs, tmp_path / "away" / "venv")
    assert done.stderr.startswith(f"{tmp_path}\n"), "asked where the environment goes, not where the checkout is"
    done.stderr = done.stderr.partition("\n")[2]
    assert_refused(done, f"only 500 MB are free in {tmp_path}")


def horovod_builds(programs: Path, venv: Path, gpus: str, torch_has_cuda: bool, code: int = 0) -> tuple[str, list[str]]:
    """What set-up says, and how it calls install-horovod, in an environment where all else is installed.

    Args:
        gpus: what nvidia-smi -L does, in shell.
        code: how install-horovod --gpu ends.
    """
    (venv / "bin").mkdir(parents=True)
    calls = venv / "calls"
    replace(programs / "nvidia-smi", gpus)
    replace(venv / "bin" / "python", f'case "$*" in *torch.version.cuda*) exit {int(not torch_has_cuda)};; esac')
    replace(venv / "bin" / "hpctrain", f'echo "$*" >>{calls}; case "$*" in *--gpu) exit {code};; esac')
    done = set_up(programs, venv)
    assert done.returncode == (0 if code in (0, 64, 70) else code), done.stderr
    assert (venv / ".set-up").exists() == (done.returncode == 0)
    return done.stdout, calls.read_text().splitlines()


ONE_GPU = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1f2e)'"
FOR_CPUS, FOR_GPUS = "install-horovod", "install-horovod --gpu"


@pytest.mark.parametrize(
    ("gpus", "torch_has_cuda", "build"),
    [
        (ONE_GPU, True, FOR_GPUS),
        (ONE_GPU, False, FOR_CPUS),
        ("echo 'No devices found.'; exit 6", True, FOR_CPUS),
        ("exit 9", True, FOR_CPUS),
    ],
    ids=["a GPU", "PyTorch for CPUs", "no GPU", "a broken driver"],
)
def test_horovod_is_built_for_where_pytorch_trains(programs, tmp_path, gpus, torch_has_cuda, build):
    assert horovod_builds(programs, tmp_path / "venv", gpus, torch_has_cuda)[1] == [build]


@pytest.mark.parametrize("code", [64, 70])
def test_where_horovod_cannot_be_built_for_gpus_it_is_built_for_cpus(programs, tmp_path, code):
    said, builds = horovod_builds(programs, tmp_path / "venv", ONE_GPU, True, code)
    assert builds == [FOR_GPUS, FOR_CPUS]
    assert "models on a GPU reduce over MPI" in said


def test_an_interrupted_build_ends_the_set_up(programs, tmp_path):
    assert horovod_builds(programs, tmp_path / "venv", ONE_GPU, True, code=130)[1] == [FOR_GPUS]


def test_an_environment_that_path_names_by_a_link_keeps_its_mpi(programs, tmp_path):
    """As where a home lies behind a link: its MPI would be taken away, as if the site had another."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name in ("python", "hpctrain", "mpicc"):
        replace(tmp_path / "venv" / "bin" / name, "")
    (tmp_path / "home").symlink_to(tmp_path)
    done = set_up(programs, tmp_path / "venv", PATH=f"{tmp_path}/home/venv/bin:{programs}")
    assert done.returncode == 0 and "MPI: Open MPI's wheel" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("tag", ["cp311-cp311-linux_x86_64", "cp311-cp311-manylinux_2_17_x86_64"])
def test_an_mpi4py_for_the_mpi_of_a_site_is_replaced_once_that_is_gone(programs, tmp_path, tag):
    venv = tmp_path / "venv"
    metadata = venv / "lib/python3.11/site-packages/mpi4py-4.1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "WHEEL").write_text(f"Root-Is-Purelib: false\nTag: {tag}\n")
    (venv / "bin").mkdir()
    replace(venv / "bin" / "python", f'echo "$*" >>{venv}/calls')
    replace(venv / "bin" / "hpctrain", "")
    done = set_up(programs, venv)
    assert done.returncode == 0, done.stderr
    again = [line for line in (venv / "calls").read_text().splitlines() if "--force-reinstall" in line]
    assert [line.split()[-1] for line in again] == (["mpi4py"] if "-linux_" in tag else [])


@pytest.mark.slow
def test_no_network(programs, tmp_path):
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    done = set_up(programs, tmp_path / "venv", **nowhere)
    assert_refused(done, "package index", "network")
    assert not (tmp_path / "venv" / ".set-up").exists()

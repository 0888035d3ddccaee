"""The Horovod that is built: its last release with text edits for current compilers and frameworks; wheel identity.

Horovod 0.28.1 (June 2023) sets C++14, but PyTorch's headers need C++20 and TensorFlow's C++17.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.system import safe_read

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Edit:
    """One replacement in one file of the sdist; `old` must occur there exactly once."""

    path: str
    old: str
    new: str


_FOR_EVERY_BUILD = (
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # The cached wheel is used in other environments: refer to libraries relative to it, not by this one's path.
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../.." $ENV{HPCTRAIN_MPI_RPATH})\n'
        # Since g++ 13 the standard headers no longer include these, and Horovod does not include them itself.
        'set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -include cstdint -include string")',
    ),
    # Debug information takes a third of the compilers' time and nine tenths of the wheel.
    Edit(
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
    ),
    Edit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # Python 3.12 has no distutils.
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
)
_FOR_CPUS = (
    # This file is only for GPUs, but includes XLA headers that need headers missing from TensorFlow's wheel.
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # A CUDA build of torch with an nvcc on PATH must not turn a build for CPUs partly into one for GPUs.
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "print(False)",
    ),
    # An nvcc that does not support this C++ compiler must not break the build.
    Edit("CMakeLists.txt", "    enable_language(CUDA)\n", ""),
)
_FOR_GPUS = (
    Edit("horovod/common/ops/cuda/CMakeLists.txt", "set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)"),
)


def edits(gpu: bool) -> tuple[Edit, ...]:
    """The edits for a build for GPUs or for CPUs."""
    return _FOR_EVERY_BUILD + (_FOR_GPUS if gpu else _FOR_CPUS)


def digest(chosen: Iterable[Edit]) -> str:
    """Hash of edits: builds with equal digests made the same changes."""
    return hashlib.sha256(repr(tuple(chosen)).encode()).hexdigest()


def verify(sdist: Path) -> bytes:
    """Reads `sdist`. Raises UserError unless it is exactly the release for which the edits were written."""
    content = safe_read.read(sdist)
    if hashlib.sha256(content).hexdigest() != SDIST_SHA256:
        fix = "delete it and try again, or name an unchanged one with --sdist"
        raise UserError(f"{sdist} is not the sdist of Horovod {VERSION}: its SHA-256 differs", fix)
    return content


def apply(source: Path, chosen: Iterable[Edit]) -> None:
    """Applies edits to the unpacked sdist in `source`.

    Raises:
        UserError: an edit does not apply, so this is not the release for which the edits were written.
    """
    for edit in chosen:
        file = source / edit.path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if text.count(edit.old) != 1:
            raise UserError(
                what=f"cannot prepare Horovod's source: {edit.path} does not hold {edit.old!r} exactly once; "
                f"the edits are for Horovod {VERSION}",
                fix=f"use the unchanged sdist of Horovod {VERSION} ({SDIST})",
            )
        file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


@dataclass(frozen=True)
class WheelRecipe:
    """Everything that a wheel depends on; equal recipes give equal wheels."""

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
        """The wheel's version, with the key as its local part, so that pip distinguishes builds."""
        return f"{VERSION}+{self.key}"

"""Horovod's preconditions and settings, the same for both frameworks. Imports nothing of Horovod by itself."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hpctrain.comm.group import Group
from hpctrain.errors import Code, UserError

SETTINGS = {
    "HOROVOD_CYCLE_TIME": "2.5",
    # Dynamic fusion would let timing decide which tensors are added in one message, and so the order of additions.
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
}
"""Environment variables that Horovod reads when it starts; what the user has set stays."""
MPI_LIBRARY = re.compile(r"lib(mpi|mpich|mpi-\w+|mpi_(?!cxx|mpifh|usempi)\w+)\.so[.\d]*")
BUILD = "run: hpctrain install-horovod"
_leases: dict[ModuleType, set[int]] = {}
"""Numbers of the leases in use, by framework: Horovod has one state for the whole process."""


@dataclass(frozen=True)
class Lease:
    """One reducer's use of Horovod, which runs as long as any reducer of the process uses it."""

    module: ModuleType
    number: int
    """The lowest one free: equal on ranks that open and close reducers in the same order. For names of tensors."""

    def end(self) -> None:
        """The last one ends Horovod's background thread, which would take time from the cores with nothing to do."""
        numbers = _leases.get(self.module, set())
        numbers.discard(self.number)
        if not numbers and _leases.pop(self.module, None) is not None:
            self.module.shutdown()


def load(framework: str) -> ModuleType:
    """Imports ``horovod.torch`` or ``horovod.tensorflow`` and checks that it can work here.

    Raises:
        UserError: Horovod is missing, was built without this framework, cannot be loaded, or uses another MPI
            than mpi4py.
    """
    name = f"horovod.{framework}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "horovod":
            raise UserError("Horovod is not installed", f"{BUILD}, or set reduce.kind: mpi", Code.HOROVOD) from error
        raise UserError(f"{name} cannot be imported: {error}", f"{BUILD} --force", Code.HOROVOD) from error
    except ImportError as error:
        what = f"{name} cannot be loaded: {error}"
        raise UserError(what, f"{BUILD} --force, in this environment", Code.HOROVOD) from error
    libraries = mpi_libraries(Path("/proc/self/maps").read_text())
    if len(libraries) > 1:
        raise UserError(
            f"Horovod and mpi4py use different MPI libraries: {' and '.join(libraries)}",
            f"{BUILD} --force with the mpicc of mpi4py's MPI on PATH, or set reduce.kind: mpi",
            Code.HOROVOD,
        )
    return module


def available(framework: str) -> bool:
    """Whether ``load`` would succeed."""
    try:
        load(framework)
    except UserError:
        return False
    return True


def mpi_libraries(maps: str) -> list[str]:
    """The MPI libraries that a process has mapped, from the text of /proc/<pid>/maps."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if MPI_LIBRARY.fullmatch(Path(path).name))


def start(module: ModuleType, group: Group, on_gpu: bool) -> Lease:
    """Starts Horovod's background thread on exactly the ranks of the group, unless it runs already.

    Args:
        module: of ``load``.
        group: the ranks.
        on_gpu: whether it will sum tensors on GPUs.

    Returns:
        The caller's use of it, to be ended where it needs it no more.

    Raises:
        UserError: Horovod sees other ranks than the group has.
    """
    runs = bool(module.is_initialized())
    if not runs:
        _init(module, group, on_gpu)
    if (module.rank(), module.size()) != (group.rank, group.size):
        raise UserError(
            f"Horovod sees rank {module.rank()} of {module.size()} where MPI sees rank {group.rank} of {group.size}",
            f"{BUILD} --force: it was built without MPI or for another one",
            Code.HOROVOD,
        )
    if not runs:
        _leases.pop(module, None)  # the program itself has ended it
    numbers = _leases.setdefault(module, set())
    number = next(number for number in itertools.count() if number not in numbers)
    numbers.add(number)
    return Lease(module, number)


def _init(module: ModuleType, group: Group, on_gpu: bool) -> None:
    part = group.comm if is_part(group) else None  # each data group is a separate Horovod world
    if part is not None and not module.mpi_built():
        raise UserError(
            "Horovod was built without MPI and cannot form the groups of a partitioned model", f"{BUILD} --force"
        )
    for key, value in SETTINGS.items():
        os.environ.setdefault(key, value)
    # Horovod 0.28.1 crashes at its second start if this and the cycle time are set; without fusion it means nothing.
    os.environ.pop("HOROVOD_FUSION_THRESHOLD", None)
    threads = set(os.listdir("/proc/self/task"))
    module.init(**({} if part is None else {"comm": part}))
    if not on_gpu:  # there NCCL's own threads, which move the data, would inherit it
        _give_way(set(os.listdir("/proc/self/task")) - threads)


def is_part(group: Group) -> bool:
    """Whether a group has some of the ranks only."""
    if group.comm is None:
        return False
    from mpi4py import MPI

    return group.size < MPI.COMM_WORLD.Get_size()


def _give_way(threads: set[str]) -> None:
    """Lets Horovod's thread have only the time that computing leaves.

    It spins in a collective every cycle, and if all cores compute, the model would pay for that; while the ranks
    wait for sums it has the core to itself.
    """
    for thread in threads:
        with contextlib.suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, int(thread), 19)

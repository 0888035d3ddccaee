"""Horovod's preconditions and settings, the same for both frameworks. Does not import Horovod itself."""

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
    # Dynamic fusion would let timing decide which tensors share a message, and so the order of additions.
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
}
"""Environment variables that Horovod reads when it starts; values set by the user are kept."""
MESSAGE_BYTES, MOST_MESSAGES, JOINED = 2**24, 512, 16
"""Between CPUs of one node: bytes of a message, unless there would be more of them than Horovod's cache holds well (MPI
sums several of them faster than 80 MB at once); and the part of a message below which it is worth to join tensors."""
TORCH_MESSAGE_BYTES = 2**22
"""The same for PyTorch, whose sums need not be joined: 2 ms of a step with 23 MB of gradients."""
APART_BYTES = 2**20
"""Between CPUs of one node: gradients of PyTorch of this size are separate messages, summed where autograd left them.
A copy takes 0.16 ms per MiB, one more message 0.04 ms."""
NICENESS = 5
"""Added to the niceness of Horovod's thread on CPUs. With 19, a Keras model of 18 M weights took 5% longer on an idle
machine, and others several times as long next to a busy process; with 0, a recurrent PyTorch model took 2% longer."""
MPI_LIBRARY = re.compile(r"lib(mpi|mpich|mpi-\w+|mpi_(?!cxx|mpifh|usempi)\w+)\.so[.\d]*")
BUILD = "run: hpctrain install-horovod"
_leases: dict[ModuleType, set[int]] = {}
"""Numbers of the leases in use, by framework module: Horovod has one state per process."""


@dataclass(frozen=True)
class Lease:
    """One reducer's use of Horovod, which is shut down when no reducer of the process uses it."""

    module: ModuleType
    number: int
    """Lowest free number: the same on ranks that open and close reducers in the same order. Used in tensor names."""
    cuts: bool = False
    """Whether messages are cut: on CPUs of one node. GPUs and networks are best used by long ones."""

    def most(self, elements: int, itemsize: int, message_bytes: int = MESSAGE_BYTES) -> int:
        """Elements of a message, for a sum of as many in all."""
        return max(message_bytes // itemsize, -(-elements // MOST_MESSAGES)) if self.cuts else max(elements, 1)

    def least(self, elements: int, itemsize: int) -> int:
        """Elements below which tensors of such a sum share a message, if they are not in one tensor already."""
        return self.most(elements, itemsize) // (JOINED if self.cuts else 1)

    def apart(self, elements: int, itemsize: int) -> int:
        """Elements from which a tensor of such a sum is a separate message, summed where it is (PyTorch on CPUs)."""
        least = APART_BYTES if self.cuts else TORCH_MESSAGE_BYTES
        return max(least // itemsize, 2 * elements // MOST_MESSAGES)

    def end(self) -> None:
        """Ends this use. The last one shuts down Horovod's background thread, which would use the cores while idle."""
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
        module: the module returned by ``load``.
        group: the ranks.
        on_gpu: whether it will sum tensors on GPUs.

    Returns:
            The caller's lease; end it when Horovod is no longer needed.

        Raises:
            UserError: Horovod sees other ranks than the group's.
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
        _leases.pop(module, None)  # the user's program has shut it down
    numbers = _leases.setdefault(module, set())
    number = next(number for number in itertools.count() if number not in numbers)
    numbers.add(number)
    return Lease(module, number, not on_gpu and module.local_size() == module.size())


def _init(module: ModuleType, group: Group, on_gpu: bool) -> None:
    part = group.comm if is_part(group) else None  # each data group forms its own Horovod world
    if part is not None and not module.mpi_built():
        raise UserError(
            "Horovod was built without MPI and cannot form the groups of a partitioned model", f"{BUILD} --force"
        )
    for key, value in SETTINGS.items():
        os.environ.setdefault(key, value)
    # Horovod 0.28.1 crashes at its second start if both this and the cycle time are set; unused without fusion.
    os.environ.pop("HOROVOD_FUSION_THRESHOLD", None)
    threads = set(os.listdir("/proc/self/task"))
    module.init(**({} if part is None else {"comm": part}))
    if not on_gpu:  # NCCL's own threads, which move the data, would inherit the priority
        _give_way(set(os.listdir("/proc/self/task")) - threads)


def is_part(group: Group) -> bool:
    """Whether a group contains only some of the ranks."""
    if group.comm is None:
        return False
    from mpi4py import MPI

    return group.size < MPI.COMM_WORLD.Get_size()


def _give_way(threads: set[str]) -> None:
    """Gives Horovod's thread a lower priority, so that it takes less from a model that computes on all cores.

    It spins in a collective every cycle; while ranks wait for sums it has a core to itself.
    """
    for thread in threads:
        with contextlib.suppress(OSError):  # it may have ended
            own = os.getpriority(os.PRIO_PROCESS, int(thread))
            os.setpriority(os.PRIO_PROCESS, int(thread), own + NICENESS)

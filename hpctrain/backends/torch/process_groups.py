"""Torch process groups over the ranks of a Group. Their address is sent by MPI, so no launcher or environment variable
needs to set it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.device import gpu_for_nccl
from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.imagined import Imagined
from hpctrain.comm.world import World
from hpctrain.errors import RunFailed, UserError
from hpctrain.system import python
from hpctrain.system.address import interface_of, interfaces, listen, meeting_address, routed_address
from hpctrain.system.processes import threads_sleep

GLOO = "hpctrain_gloo"
"""Name of a gloo backend on an address chosen here; gloo itself would use the one that the host name resolves to."""
GLOO_THREAD = "pt_gloo_runloop"
"""Name that torch gives to the threads that run gloo's collectives."""
LOOKS = 5
"""Number of consecutive checks of gloo's threads, a millisecond apart."""
OWN_ERRORS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false"}
"""Read by torch when it creates an NCCL group: errors are raised where a rank waits, and messages are sent in order."""
IN_SWITCHES = ("NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")
"""Variables that let NCCL add in switches, in an order that may differ from run to run."""
INTERFACE = "NCCL_SOCKET_IFNAME"
"""Variable with the interfaces that NCCL may use; "=" before a name that must match as a whole."""
WORDS: dict[str, Literal["nccl", "xccl"]] = {"cuda": "nccl", "xpu": "xccl"}
"""Backends by type of device; ROCm's PyTorch says ``cuda``, and its RCCL is ``nccl``."""
LIBUV_TAKES_SOCKETS = "2.8"
"""The oldest PyTorch whose newer kind of TCPStore can listen on an open socket."""
WHAT = "open a process group of torch"
"""Completes "waited for the other ranks to ..." in errors."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group find each other."""

    address: str
    """Address of this rank's host that the others can reach."""
    store: dist.Store
    """Store on the first rank; lives as long as the group."""
    members: Sequence[int]
    """The group's ranks in MPI's world."""


def word_of(device: torch.device) -> Literal["nccl", "xccl", "gloo"]:
    """The backend for tensors on this device."""
    return WORDS.get(device.type, "gloo")


def sum_exactly() -> None:
    """Keeps NCCL, in this process, from adding in switches, unless the user has set that."""
    for name in IN_SWITCHES:
        os.environ.setdefault(name, "0")


def settings_of(device: torch.device) -> dict[str, str]:
    """What sums on a GPU depend on: version and variables of NCCL, except for the interface; empty without it."""
    if word_of(device) != "nccl":
        return {}
    version = accelerator.nccl_version(device)
    return {
        "version": version,
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_") and name != INTERFACE},
    }


def meet(group: Group, name: str, timeout_s: float = TIMEOUT_S) -> Rendezvous:
    """Opens a store on a free port of the first rank. Collective.

    Args:
        group: the ranks; more than one.
        name: separates the keys of groups that use one store.
        timeout_s: longest wait for another rank, also in the group's later collectives.

    Raises:
        UserError: the hosts have no network in common, or the first rank cannot be reached; on all ranks.
    """
    from mpi4py import MPI

    members = group.allgather(MPI.COMM_WORLD.rank, WHAT)
    address = address_in(group)
    agree(group, None if address else f"{socket.gethostname()} has no network in common with the other hosts")
    assert address is not None, "agreed"
    port, store, problem = 0, None, None
    if group.rank == 0:
        try:
            listener = listen(address)
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                address, port, group.size, True, timedelta(seconds=timeout_s), wait_for_workers=False,
                master_listen_fd=listener.detach(), use_libuv=torch.__version__ >= LIBUV_TAKES_SOCKETS,
            )  # fmt: skip
        except (OSError, RuntimeError) as error:
            problem = f"cannot listen on {address}: {error}"
    first, port = group.broadcast([address, port], WHAT)
    if group.rank and port:
        try:
            store = dist.TCPStore(first, port, group.size, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        except RuntimeError as error:
            problem = f"{first} cannot be reached from {address}: {error}"
    agree(group, problem)
    assert store is not None, "agreed"
    return Rendezvous(address, dist.PrefixStore(name, store), members)


def address_in(group: Group) -> str | None:
    """This host's address in a network that the hosts of all ranks have; None if there is none. Collective."""
    own = interfaces()
    everywhere = group.allgather([one.address for one in own], WHAT)
    others = [addresses for rank, addresses in enumerate(everywhere) if rank != group.rank]
    return meeting_address(own, others) or routed_address(others)


def use_shared_network(world: World, device: torch.device) -> None:
    """Has NCCL connect over the interface at which the hosts meet, unless the user names one. Collective.

    NCCL itself takes the first interface, which on some hosts leads only to others of its kind. It reads the variable
    once, so this must come before the first process group.
    """
    if word_of(device) != "nccl" or world.nodes == 1:
        return
    if name := interface_of(address_in(world.everyone) or ""):
        os.environ.setdefault(INTERFACE, f"={name}")


def agree(group: Group, problem: str | None) -> None:
    """Raises UserError, on all ranks, if any rank has a problem. Collective."""
    found = [one for one in group.allgather(problem, WHAT) if one]
    if found:
        raise UserError(
            f"the ranks cannot open a process group of torch: {found[0].splitlines()[0]}",
            "allow connections between the hosts of a job on all ports",
        )


def have_own_gpus(group: Group, device: torch.device) -> bool:
    """Whether each rank has a GPU to itself. Collective."""
    of_ranks = gpus_of(group, device)
    return "" not in of_ranks and len(set(of_ranks)) == len(of_ranks)


def require_own_gpus(group: Group, device: torch.device) -> None:
    """Raises UserError, on all ranks, if two ranks are on one GPU. Collective."""
    of_ranks = gpus_of(group, device)
    shared = next((one for one in of_ranks if of_ranks.count(one) > 1), None)
    if shared is not None:
        sharing = [str(rank) for rank, one in enumerate(of_ranks) if one == shared]
        raise UserError(
            f"ranks {', '.join(sharing)} that see different samples are on one GPU, and NCCL takes one rank on each",
            "start as many ranks on a node as it has GPUs, or let them exchange through host memory: reduce.kind: mpi, "
            "and parallel.shard: optimizer in place of parameters or gradients",
        )


def each_has_a_gpu(world: World, device: torch.device) -> bool:
    """Whether each rank of each data group has a GPU to itself. Collective."""
    return all(world.everyone.allgather(have_own_gpus(world.data, device), WHAT))


def by_group(kind: str, world: World, device: torch.device) -> bool:
    """Whether gradients go through a process group, for this ``reduce.kind``. Collective."""
    return kind == "nccl" or (kind == "auto" and each_has_a_gpu(world, device))


def gpus_of(group: Group, device: torch.device) -> list[str]:
    """The GPU of each rank; empty for a rank on the CPU. Collective."""
    return group.allgather("" if device.type == "cpu" else gpu_for_nccl(device), WHAT)


def ends_calmly() -> None:
    """Makes the process, at exit, wait until gloo's threads have released the tensors of their last collective.

    To release them, they take the interpreter lock, and a thread that does so during interpreter shutdown aborts the
    process, although all work is done (PyTorch issue 190489).
    """
    atexit.unregister(await_gloo)
    atexit.register(await_gloo)


def await_gloo(timeout_s: float = 5.0) -> None:
    """Returns when gloo's threads have nothing left to do, or after ``timeout_s``.

    Each sleep releases the interpreter lock to threads that wait for it. These appear asleep, too, so only threads that
    sleep at several consecutive checks are done.
    """
    asleep, end = 0, time.monotonic() + timeout_s
    while asleep < LOOKS and time.monotonic() < end:
        time.sleep(0.001)
        asleep = asleep + 1 if threads_sleep(GLOO_THREAD) else 0


def gloo(
    address: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str = "",
    members: Sequence[int] = (),
) -> dist.ProcessGroupGloo:
    """A gloo process group on an address of this host; name and world ranks are for torch's flight recorder."""
    ends_calmly()
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    if hasattr(options, "group_name"):  # not in PyTorch 2.6, whose recorder knows only NCCL
        options.group_name = name
        options.global_ranks_in_group = list(members)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl(group: Group, meeting: Rendezvous, device: torch.device, timeout: timedelta) -> Any:
    """An NCCL (or XCCL) process group, connected at once. Collective. Raises UserError, on all ranks, if that fails.

    NCCL's errors are raised where a rank begins or awaits an operation, instead of ending the process from a thread, as
    torch does by default. An operation that never ends is the monitor's to report.
    """
    word = word_of(device)
    kind: Any = getattr(dist, f"ProcessGroup{word.upper()}")
    options = kind.Options()
    options.group_name = group.name
    options.global_ranks_in_group = list(meeting.members)
    options._timeout = timeout
    ranks, problem = None, None
    try:
        with environment(OWN_ERRORS):
            ranks = kind(meeting.store, group.rank, group.size, options)
            # One communicator for all operations, also for messages, which are then sent in order.
            ranks.eager_connect_single_device(device)
    except RuntimeError as error:
        problem = f"{word}: {error}"
    agree(group, problem)
    assert ranks is not None, "agreed"
    return ranks


@dataclass(eq=False)
class ProcessGroup:
    """A process group over the ranks of a Group, which all who open it share; made by ``peers_of``."""

    group: Group
    """The ranks."""
    ranks: Any
    """The process group."""
    device: torch.device
    """Device of the tensors."""
    users: int = 0

    def shared(self) -> ProcessGroup:
        """Begins one use."""
        self.users += 1
        return self

    def close(self) -> None:
        """Ends one use; the last one closes the process group on this rank."""
        self.users -= 1
        if not self.users:
            del OPEN[self.group]
            if is_left_open(self.device):
                return
            accelerator.synchronize(self.device)
            for name in ("shutdown", "_shutdown"):  # PyTorch 2.6 has the second one for NCCL, and none for gloo
                if hasattr(self.ranks, name):
                    getattr(self.ranks, name)()
                    break

    def sum(self, values: Tensor, what: str) -> Callable[[], None]:
        """Starts a sum over the ranks, in place; returns a function that waits for it: on a GPU, its stream alone.

        On a GPU it begins once the kernels before it have written the values. ``what`` as for ``explained``.
        """
        return self.started(lambda: self.ranks.allreduce([values]), what)

    def reduce(self, values: Tensor, rank: int, what: str) -> Callable[[], None]:
        """The same for a sum that this rank of the group gets; on the others the values are lost."""
        return self.started(lambda: self.ranks.reduce(values, rank), what)

    def broadcast(self, values: Tensor, rank: int, what: str) -> Callable[[], None]:
        """The same for values of this rank of the group, which all ranks get."""
        return self.started(lambda: self.ranks.broadcast(values, rank), what)

    def gather(self, values: Tensor, what: str) -> Tensor:
        """The contiguous values of all ranks along a new first axis; on a GPU its stream waits for them."""
        everything = values.new_empty((self.group.size, *values.shape))
        if values.numel():
            self.started(lambda: self.ranks._allgather_base(everything.view(-1), values.view(-1)), what)()
        return everything

    def started(self, begin: Callable[[], dist.Work], what: str) -> Callable[[], None]:
        """Begins an operation; returns a function that waits for it."""
        with self.explained(what):
            work = begin()

        def wait() -> None:
            with self.explained(what):
                work.wait()

        return wait

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Converts torch's errors, but for out of memory, to RunFailed; ``what`` completes "waited for the other ranks
        to ..."."""
        begun = time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.device.type == "cpu":  # NCCL's abort waits for other ranks, up to the group's timeout: see close
                with contextlib.suppress(RuntimeError, AttributeError):  # gloo has none in PyTorch 2.6
                    self.ranks.abort()
            raise RunFailed(
                f"rank {self.group.rank} of {self.group.size} waited {time.monotonic() - begun:.0f} s for the other "
                f"ranks to {what}: {str(error).strip().splitlines()[0]}",
                "look for the rank that ended, or never arrived, in the logs of the run folder",
            ) from error


def is_left_open(device: torch.device) -> bool:
    """Whether to leave a process group open, as this rank fails; the process then ends without its destructor.

    Closing waits for collectives that other ranks may never enter, and NCCL also for the node's other ranks
    (ncclCommDestroy), while these wait for this one, whose error would not be reported.
    """
    if device.type == "cpu" or sys.exc_info()[0] is None:
        return False
    python.AT_ONCE.set()
    return True


OPEN: WeakKeyDictionary[Group, ProcessGroup] = WeakKeyDictionary()
"""Process groups in use. A GPU would need memory for each communicator, and could wait for two of them at once."""


def peers_of(group: Group, device: torch.device, timeout_s: float = TIMEOUT_S) -> ProcessGroup:
    """The process group of these ranks: NCCL for ranks with a GPU each, gloo for tensors on the host. Collective.

    Raises UserError, on all ranks, if ranks share a GPU or cannot reach each other.
    """
    if group not in OPEN:
        if word_of(device) != "gloo":
            require_own_gpus(group, device)
        meeting = meet(group, group.name, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        ranks: Any = (
            gloo(meeting.address, meeting.store, group.rank, group.size, timeout, group.name, meeting.members)
            if word_of(device) == "gloo"
            else nccl(group, meeting, device, timeout)
        )
        OPEN[group] = ProcessGroup(group, ranks, device)
    return OPEN[group].shared()


def broadcast(group: Group, tensors: Sequence[Tensor], what: str, peers: ProcessGroup | None = None) -> None:
    """Overwrites tensors with those of the group's rank 0. Collective.

    Args:
        group: the ranks, such as ``world.data``.
        tensors: on any device, of the same shapes and dtypes on every rank.
        what: completes "waited for the other ranks to ..." in an error.
        peers: process group of the same ranks, which sends them from device to device; None: through host memory.
    """
    if group.comm is None:
        return
    for tensor in tensors:
        device = "cpu" if peers is None else peers.device  # a module may keep a buffer on the host
        copy = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        if peers is None:
            group.broadcast_array(copy.view(-1).view(torch.uint8).numpy(), what)
        elif copy.numel():
            peers.broadcast(copy.view(-1).view(torch.uint8), 0, what)()
        with torch.no_grad():
            tensor.copy_(copy)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that torch reads in the body."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class DefaultGroup:
    """Opens ``torch.distributed`` so that its world is the ranks of a group.

    The constructor is collective.

    Args:
        group: the ranks; more than one.
        device: device of the tensors.
        timeout_s: longest wait for another rank.

    Raises:
        UserError: the ranks cannot reach each other, or the task has opened ``torch.distributed`` itself.
    """

    def __init__(self, group: Group, device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
        if dist.is_initialized():
            raise UserError(
                "the task has opened torch.distributed, which this parallel.shard opens itself",
                "leave torch.distributed.init_process_group out of the task",
            )
        self.word, self.device, self.is_open = word_of(device), device, True
        if isinstance(group, Imagined):
            dist.init_process_group("fake", rank=group.rank, world_size=group.size)
            return
        if self.word == "nccl":
            require_own_gpus(group, device)
        meeting = meet(group, "hpctrain", timeout_s)
        if self.word == "gloo":
            Backend.register_backend(GLOO, functools.partial(gloo, meeting.address), devices=["cpu"])
        problem = None
        try:
            dist.init_process_group(
                GLOO if self.word == "gloo" else self.word,
                store=meeting.store,
                rank=group.rank,
                world_size=group.size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if self.word == "nccl" else None,
            )
        except RuntimeError as error:
            problem = f"{self.word}: {error}"
        agree(group, problem)

    def close(self) -> None:
        """Closes it on this rank."""
        if self.is_open and not is_left_open(self.device):
            self.is_open = False
            dist.destroy_process_group()

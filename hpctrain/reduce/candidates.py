"""The ways to sum gradients over ranks, and which of them are possible in a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature
from hpctrain.config.sections import ReduceConfig
from hpctrain.system.shared_memory import FOLDER

Backend = Literal["gloo", "nccl", "xccl"]
Kind = Literal["none", "mpi", "horovod", "gloo", "nccl", "xccl"]
Way = Literal["node", "pieces", "flat", "overlap", "sharded"]


@dataclass(frozen=True)
class Candidate:
    """One way of summing gradients over ranks."""

    kind: Kind
    """The last three are PyTorch's process groups, by device."""
    way: Way = "flat"
    """node: through shared memory; pieces: many small messages between nodes; flat: one message after backward;
    overlap: buckets during backward; sharded: each rank gets the sums it updates with (parallel.shard)."""
    compression: Literal["none", "fp16", "bf16"] = "none"

    @property
    def name(self) -> str:
        """Such as ``mpi-node`` or ``horovod-overlap-fp16``."""
        if self.kind == "none":
            return "none"
        return f"{self.kind}-{self.way}" + ("" if self.compression == "none" else f"-{self.compression}")

    @classmethod
    def parse(cls, name: str) -> Candidate:
        """Returns the candidate of this name; raises ValueError if there is none."""
        known = {candidate.name: candidate for candidate in EVERY_CANDIDATE}
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
        return known[name]


SUMMING: tuple[Kind, ...] = ("mpi", "horovod", "gloo", "nccl", "xccl")
EVERY_CANDIDATE = (
    Candidate("none"),
    *(
        Candidate(kind, way, compression)
        for kind in SUMMING
        for way in ("node", "pieces", "flat", "overlap")
        for compression in ("none", "fp16", "bf16")
        if (way not in ("node", "pieces") or (kind, compression) == ("mpi", "none"))
        and (kind, compression) != ("horovod", "bf16")
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """Facts about the job that decide which candidates are possible."""

    ranks: int
    nodes: int
    shared_memory: bool
    """Whether ranks of a node can share memory."""
    horovod: bool
    """Whether Horovod is installed, works, and uses the same MPI."""
    gpu: bool
    """Whether gradients are on a GPU."""
    backend: Backend = "gloo"
    """PyTorch's process groups for the gradients' device."""
    own_gpus: bool = False
    """Whether each rank has its own GPU."""


def look_around(
    config: ReduceConfig,
    world: World,
    gpu: bool,
    has_horovod: Callable[[], bool],
    backend: Backend = "gloo",
    own_gpus: bool = False,
) -> Surroundings:
    """What all ranks have; the same on all, even if nodes differ, so that all make the same calls. Collective.

    All data groups agree too: values that are equal across them stay equal only if all sum in the same way.

    Args:
        config: the run file's reduce section.
        world: the ranks.
        gpu: whether this rank's gradients are on a GPU.
        has_horovod: whether Horovod works here; asked only if it may be chosen.
        backend: PyTorch's process groups for this rank's device.
        own_gpus: whether each rank of each data group has its own GPU; the same on all ranks.
    """
    group, peers = world.everyone, world.data
    horovod = peers.size > 1 and config.kind == "auto" and not own_gpus and has_horovod()
    neighbours = world.local_size > world.tensor.size
    if world.pipeline.size > 1:  # the node's other ranks may belong to other stages
        neighbours = peers.allgather(world.node, "find the nodes of the data group").count(world.node) > 1
    shares = neighbours and os.path.isdir(FOLDER)
    everywhere = group.allgather([shares, horovod, gpu], "compare what gradients could be summed with")
    shared_memory, horovod, gpu = (all(column) for column in zip(*everywhere, strict=True))
    return Surroundings(peers.size, world.nodes, shared_memory, horovod, gpu, backend, own_gpus)


def candidates(config: ReduceConfig, around: Surroundings) -> list[Candidate]:
    """The possible candidates, best guess first. An explicit kind gives exactly one, so timing never decides.

    Raises:
        UserError: the configuration asks for something that does not work here.
    """
    if around.ranks == 1:
        return [Candidate("none")]
    refuse({**config.features(), Feature.RANKS: around.ranks})
    ways = [_mpi(config, around)]
    if config.kind == "horovod":
        ways = [_horovod(config, around)]
    elif config.kind == "nccl" or (config.kind == "auto" and around.own_gpus):  # nothing else is near it on GPUs
        ways = [Candidate(around.backend, "flat" if config.overlap == "off" else "overlap")]
    elif config.kind == "auto":
        ways = _every_way(config, around)
    squeezed: tuple[Literal["none", "fp16", "bf16"], ...]
    squeezed = ("none", "fp16") if config.compression == "auto" else (config.compression,)
    found = [Candidate(way.kind, way.way, compression) for way in ways for compression in squeezed]
    return list(dict.fromkeys(map(_feasible, found)))


def _mpi(config: ReduceConfig, around: Surroundings) -> Candidate:
    if config.overlap == "on":
        return Candidate("mpi", "overlap")
    return Candidate("mpi", "node" if around.shared_memory and config.compression == "none" else "flat")


def _horovod(config: ReduceConfig, around: Surroundings) -> Candidate:
    overlaps = config.overlap == "on" or (config.overlap == "auto" and (around.gpu or around.nodes > 1))
    return Candidate("horovod", "overlap" if overlaps else "flat")


def _every_way(config: ReduceConfig, around: Surroundings) -> list[Candidate]:
    overlaps, waits = config.overlap != "off", config.overlap != "on"
    horovod = around.horovod and config.compression != "bf16"
    ways = [
        (Candidate("mpi", "node"), waits and around.shared_memory),
        (Candidate("mpi", "pieces"), waits and around.nodes > 1),
        (Candidate("mpi", "flat"), waits and (around.nodes > 1 or not around.shared_memory)),
        (Candidate("mpi", "overlap"), overlaps and around.nodes > 1),
        (Candidate("horovod", "overlap"), overlaps and horovod),
        (Candidate("horovod", "flat"), waits and horovod),
    ]
    return [way for way, possible in ways if possible] or [_mpi(config, around)]


def _feasible(candidate: Candidate) -> Candidate:
    """Compressed MPI sums after backward are always flat, between all ranks."""
    if candidate.kind == "mpi" and candidate.way != "overlap" and candidate.compression != "none":
        return Candidate("mpi", "flat", candidate.compression)
    return candidate

"""What a rank needs of memory for a model, added up from the state of a framework, and which layouts of a number of
ranks fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from hpctrain.parallel.pipeline import bubble
from hpctrain.train.state import Cut, Placement, StateTensor


@dataclass(frozen=True)
class TensorSize:
    """What an estimate has to know of a train.state.StateTensor, which may be gone."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    cut: Cut | None
    is_trained: bool

    @classmethod
    def of(cls, tensor: StateTensor) -> TensorSize:
        """The same without values."""
        return cls(tensor.name, tensor.shape, tensor.dtype, tensor.placement, tensor.cut, tensor.is_trained)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a model as the first rank of a tensor group has it, at one size of the group."""

    parameters: int
    """Buffers included."""
    gradients: int
    optimizer: int
    """Its state, after an update."""
    averages: int
    """Moving averages of the parameters (``train.ema_decay``)."""
    activations: float
    """What a forward pass keeps for the backward pass, of one sample."""
    checkpoint: int
    """The whole state of the run, on disk."""
    stages: Mapping[int, MemoryEstimate] = field(default_factory=dict)
    """Of the largest stage, by how many there are."""
    shards: Mapping[str, MemoryEstimate] = field(default_factory=dict)
    """Of the rank with most, by the values of ``parallel.shard`` that can be."""

    def scaled(self, **shares: float) -> MemoryEstimate:
        """With these shares of some of the parts above, rounded up."""
        return replace(self, **{name: math.ceil(getattr(self, name) * share) for name, share in shares.items()})


def of_state(state: Iterable[TensorSize], activations: float, ranks: int) -> MemoryEstimate:
    """Adds up a framework's state by kind."""
    held = dict.fromkeys(("model", "optimizer", "ema"), 0)
    whole: dict[str, int] = {}
    gradients = 0
    for tensor in state:
        own = num_bytes(tensor, tensor.shape)
        kind = tensor.name.partition("/")[0]
        held[kind] = held.get(kind, 0) + own
        if kind == "model" and tensor.is_trained:
            gradients += max(own, 4 * math.prod(tensor.shape))
        saved = num_bytes(tensor, tensor.cut.shape) if tensor.cut else own
        whole[tensor.name] = saved * (ranks if tensor.placement is Placement.RANK else 1)
    return MemoryEstimate(held["model"], gradients, held["optimizer"], held["ema"], activations, sum(whole.values()))


def num_bytes(tensor: TensorSize, shape: tuple[int, ...]) -> int:
    """Of a tensor's dtype in some shape."""
    return math.prod(shape) * (2 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype).itemsize)


@dataclass(frozen=True)
class ParallelLayout:
    """What becomes of the ranks of a run."""

    tensor: int
    """``parallel.tensor``."""
    data: int
    """Ranks that see different samples."""
    shard: str
    """``parallel.shard``."""
    pipeline: int = 1
    """``parallel.pipeline``."""

    @property
    def keys(self) -> str:
        """How it is written into a run file."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline}
        given = [f"{key}: {size}" for key, size in sizes.items() if size > 1]
        given += [f"shard: {self.shard}"] if self.shard != "none" else []
        return f"parallel: {{{', '.join(given)}}}"


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank, the one that has most."""

    plan: ParallelLayout
    program: int
    """The process before there is a model: Python, PyTorch, MPI."""
    parameters: int
    gradients: int
    optimizer: int
    averages: int
    activations: int
    staging: int
    """Where a checkpoint waits for the disk: the part that this rank writes."""
    checkpoint: int
    """On disk; not of a rank."""
    bubble: float = 0.0
    """Share of a step for which each stage waits for the others, if all take equally long."""

    @property
    def total(self) -> int:
        """Of the rank."""
        state = self.parameters + self.gradients + self.optimizer + self.averages
        return self.program + state + self.activations + self.staging

    def to_json(self) -> dict[str, Any]:
        """With the total."""
        return {**asdict(self), "total": self.total}


def footprints(
    estimates: Mapping[int, MemoryEstimate],
    ranks: int,
    samples: Mapping[int, int],
    program: int,
    micro_batches: int = 1,
) -> list[Footprint]:
    """Of every plan, those first that change least: whole models before cut ones, whole states before sharded ones.

    Args:
        estimates: by the size of the tensor group; sizes that cannot be are left out.
        ranks: of the run.
        samples: of a rank's largest micro-batch, by the number of ranks per model.
        program: bytes of a process without a model.
        micro_batches: of an update (``train.accumulate``).
    """
    of_plans = [
        (pipeline, tensor, shard, model)
        for tensor, whole in estimates.items()
        for pipeline, shard, model in (
            (1, "none", whole),
            *((1, shard, model) for shard, model in whole.shards.items()),
            *((pipeline, "none", model) for pipeline, model in whole.stages.items()),
        )
    ]
    return [
        Footprint(
            ParallelLayout(tensor, ranks // (tensor * pipeline), shard, pipeline),
            program,
            model.parameters,
            model.gradients,
            model.optimizer,
            model.averages,
            round(model.activations * samples[tensor * pipeline]),
            -(-model.checkpoint // ranks),
            model.checkpoint,
            bubble(pipeline, micro_batches),
        )
        for pipeline, tensor, shard, model in sorted(of_plans, key=lambda one: one[:2])
    ]


def cheapest(found: Sequence[Footprint], limit: int) -> Footprint | None:
    """The first that fits into a rank's memory."""
    return next((one for one in found if one.total <= limit), None)

"""Estimates a model's memory per rank from a framework's state, and finds the parallel layouts that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from hpctrain.backends.torch.strategies.pipeline.stage_schedule import bubble
from hpctrain.train.state import Cut, Placement, StateTensor


@dataclass(frozen=True)
class TensorSize:
    """Name, size and placement of a train.state.StateTensor, which need not exist any more."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    cut: Cut | None
    is_trained: bool

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.cut.shape if self.cut else self.shape

    @classmethod
    def of(cls, tensor: StateTensor) -> TensorSize:
        """The sizes of a tensor."""
        return cls(tensor.name, tensor.shape, tensor.dtype, tensor.placement, tensor.cut, tensor.is_trained)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a model on the first rank of a tensor group, for one size of the group."""

    parameters: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    """Optimizer state after an update."""
    averages: int
    """Moving averages of the parameters (``train.ema_decay``)."""
    activations: float
    """What a forward pass keeps for the backward pass, per sample."""
    checkpoint: int
    """The whole state of the run, on disk."""
    stages: Mapping[int, MemoryEstimate] = field(default_factory=dict)
    """Estimate for the largest stage, by number of stages."""
    shards: Mapping[str, MemoryEstimate] = field(default_factory=dict)
    """Estimate for the rank with the most, by possible value of ``parallel.shard``."""
    copies: int = 0
    """Copies of weights in 16 bits that autocast makes and backward passes need; of all layers."""
    late_gradients: int = 0
    """Gradients that exist only once the backward pass has begun to free activations, whose memory they take."""
    freed: int = 0
    """Gathered parameters that backward passes free while they make gradients, beyond ``late_gradients``."""
    offloaded: int = 0
    """State that ``parallel.offload`` keeps in host memory."""

    @property
    def parts(self) -> dict[str, int]:
        """What a rank holds between passes, by kind."""
        names = ("parameters", "gradients", "optimizer", "averages")
        return {name: getattr(self, name) for name in names}

    def scaled(self, **shares: float) -> MemoryEstimate:
        """A copy with the named parts multiplied by these factors, rounded up."""
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
        whole[tensor.name] = num_bytes(tensor, tensor.whole) * (ranks if tensor.placement is Placement.RANK else 1)
    return MemoryEstimate(held["model"], gradients, held["optimizer"], held["ema"], activations, sum(whole.values()))


def num_bytes(tensor: TensorSize, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this dtype with the given shape."""
    return math.prod(shape) * (2 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype).itemsize)


@dataclass(frozen=True)
class ParallelLayout:
    """How the ranks of a run are organised."""

    tensor: int
    """``parallel.tensor``."""
    data: int
    """Ranks that see different samples."""
    shard: str
    """``parallel.shard``."""
    pipeline: int = 1
    """``parallel.pipeline``."""
    chunks: int = 1
    """``parallel.pipeline_chunks``."""

    @property
    def keys(self) -> str:
        """The layout as it is written in a run file."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "pipeline_chunks": self.chunks}
        given = [f"{key}: {size}" for key, size in sizes.items() if size > 1]
        given += [f"shard: {self.shard}"] if self.shard != "none" else []
        return f"parallel: {{{', '.join(given)}}}"


@dataclass(frozen=True)
class Footprint:
    """Memory of the rank that needs most, in bytes."""

    plan: ParallelLayout
    program: int
    """The process without a model: Python, PyTorch, MPI."""
    parameters: int
    gradients: int
    optimizer: int
    averages: int
    activations: int
    """What the forward pass of a micro-batch keeps for its backward pass, as far as it exceeds ``late_gradients``."""
    staging: int
    """Host copy of a checkpoint on its way to disk: the part that this rank writes."""
    checkpoint: int
    """Size on disk, of all ranks together."""
    bubble: float = 0.0
    """Fraction of a step that each stage spends waiting, if all passes take the same time."""
    offloaded: int = 0
    """State that ``parallel.offload`` keeps in host memory."""

    @property
    def total(self) -> int:
        """Total memory of the rank."""
        state = self.parameters + self.gradients + self.optimizer + self.averages
        return self.program + state + self.activations + self.staging

    @property
    def host(self) -> int:
        """What is in host memory if ranks train on GPUs."""
        return self.program + self.staging + self.offloaded

    @property
    def device(self) -> int:
        """What is in the memory of a GPU."""
        return self.total - self.host

    @property
    def limited(self) -> int:
        """What has to fit: with ``parallel.offload``, which spares GPUs, their part."""
        return self.device if self.offloaded else self.total

    def to_json(self) -> dict[str, Any]:
        """All fields, the total, and its parts on GPUs, JSON-able."""
        return {**asdict(self), "total": self.total, "host": self.host, "device": self.device}


def footprints(
    estimates: Mapping[int, MemoryEstimate],
    ranks: int,
    samples: Mapping[int, int],
    program: int,
    micro_batches: int = 1,
    chunks: int = 1,
) -> list[Footprint]:
    """Footprints of all plans, least intrusive first: whole models before split ones, replicated state before sharded.

    Args:
        estimates: by tensor group size; impossible sizes are left out.
        ranks: number of ranks in the run.
        samples: samples in a rank's largest micro-batch, by the number of ranks per model.
        program: bytes of a process without a model.
        micro_batches: micro-batches per update (``train.accumulate``).
        chunks: stages of each rank of a pipeline.
    """
    of_plans = [
        (pipeline, tensor, shard, model)
        for tensor, whole in estimates.items()
        for pipeline, stage in {1: whole, **whole.stages}.items()
        for shard, model in {"none": stage, **stage.shards}.items()
    ]
    found: list[Footprint] = []
    for pipeline, tensor, shard, model in sorted(of_plans, key=lambda one: one[:2]):
        kept = round(model.activations * samples[tensor * pipeline])
        freed = min(model.freed, max(0, model.late_gradients - kept))
        stages = chunks if pipeline > 1 else 1
        found.append(
            Footprint(
                plan=ParallelLayout(tensor, ranks // (tensor * pipeline), shard, pipeline, stages),
                program=program,
                parameters=model.parameters + model.copies - freed,
                gradients=model.gradients,
                optimizer=model.optimizer,
                averages=model.averages,
                activations=max(0, kept - model.late_gradients),
                staging=-(-model.checkpoint // ranks),
                checkpoint=model.checkpoint,
                bubble=bubble(pipeline, micro_batches, stages),
                offloaded=model.offloaded,
            )
        )
    return found


def cheapest(found: Sequence[Footprint], limit: int) -> Footprint | None:
    """The first footprint that fits into a rank's memory."""
    return next((one for one in found if one.limited <= limit), None)

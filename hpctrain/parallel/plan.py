"""Which plans fit a number of ranks, and what each leaves on a rank, from weighed models. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpctrain.parallel.pipeline import bubble


@dataclass(frozen=True)
class ByRows:
    """Of a model whose parameters are sharded."""

    share: float
    """Of all state: what the rank with most has."""
    gathered: int
    """Bytes of the parameters that are whole at a time: those outside of layers, a layer, and the next one."""


@dataclass(frozen=True)
class Sums:
    """What the ranks of a tensor group add up in a forward and a backward pass; to gather counts as half a sum of what
    is gathered, since its messages and bytes are half of those."""

    count: float = 0.0
    """Of a micro-batch."""
    bytes: float = 0.0
    """Of a sample."""


@dataclass(frozen=True)
class Weighed:
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
    stages: Mapping[int, Weighed] = field(default_factory=dict)
    """Of the largest stage, by how many there are."""
    largest_share: float | None = None
    """Of the parameters that ranks update: what the rank with most has, sharded over those that have the same part of
    the model; None if that cannot be."""
    by_rows: ByRows | None = None
    """With ``parallel.shard: parameters``; None if that cannot be."""
    exchanged: int = 0
    """Of the gradients that ranks with other samples average."""
    sums: Sums = Sums()
    """Within the tensor group, of the whole model."""
    tables: Weighed | None = None
    """With ``parallel.shard: tables``, what the rank with most has; None if that cannot be."""
    lookups: Sums = Sums()
    """Of such tables, in a forward and a backward pass: messages to each other rank, and bytes of a sample if all rows
    were others'."""
    handed_on: float = 0.0
    """Of a stage: what goes to the next one and back, of one sample, where it is most."""


@dataclass(frozen=True)
class Plan:
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

    plan: Plan
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
    weighed: Mapping[int, Weighed], ranks: int, samples: Mapping[int, int], program: int, micro_batches: int = 1
) -> list[Footprint]:
    """Of every plan, those first that change least: whole models before cut ones, whole states before sharded ones.

    Args:
        weighed: by the size of the tensor group; sizes that cannot be are left out.
        ranks: of the run.
        samples: of a rank's largest micro-batch, by how many ranks share out a model.
        program: bytes of a process without a model.
        micro_batches: of an update (``train.accumulate``); of several, sharded gradients are whole until the last one.
    """
    of_plans = [
        (pipeline, tensor, model)
        for tensor, whole in weighed.items()
        for pipeline, model in ((1, whole), *whole.stages.items())
    ]
    found = []
    for pipeline, tensor, model in sorted(of_plans, key=lambda one: one[:2]):
        data = ranks // (tensor * pipeline)
        whole = Footprint(
            Plan(tensor, data, "none", pipeline),
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
        found.append(whole)
        if data > 1 and model.largest_share is not None:
            share = math.ceil(model.optimizer * model.largest_share)
            found.append(replace(whole, plan=Plan(tensor, data, "optimizer", pipeline), optimizer=share))
        if data > 1 and model.by_rows is not None:
            found.append(sharded(whole, model.by_rows, micro_batches > 1))
        if data > 1 and model.tables is not None:
            rows = model.tables
            left = replace(whole, plan=Plan(tensor, data, "tables", pipeline), parameters=rows.parameters)
            found.append(replace(left, gradients=rows.gradients, optimizer=rows.optimizer, averages=rows.averages))
    return found


def sharded(whole: Footprint, rows: ByRows, accumulates: bool) -> Footprint:
    """What becomes of a rank's share of a model if its parameters are sharded."""
    return replace(
        whole,
        plan=replace(whole.plan, shard="parameters"),
        parameters=math.ceil(whole.parameters * rows.share) + rows.gathered,
        gradients=math.ceil(whole.gradients * rows.share) + (whole.gradients if accumulates else rows.gathered),
        optimizer=math.ceil(whole.optimizer * rows.share),
        averages=math.ceil(whole.averages * rows.share),
    )


def cheapest(found: Sequence[Footprint], limit: int) -> Footprint | None:
    """The first that fits into a rank's memory."""
    return next((one for one in found if one.total <= limit), None)

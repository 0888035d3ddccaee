"""Which plans fit a number of ranks, and what each leaves on a rank, from weighed models. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


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
    largest_share: float | None = None
    """Of the parameters that ranks update: what the rank with most has, sharded over all; None if that cannot be."""


@dataclass(frozen=True)
class Plan:
    """What becomes of the ranks of a run."""

    tensor: int
    """``parallel.tensor``."""
    data: int
    """Ranks that see different samples."""
    shard: str
    """``parallel.shard``."""

    @property
    def keys(self) -> str:
        """How it is written into a run file."""
        given = [f"tensor: {self.tensor}"] if self.tensor > 1 else []
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

    @property
    def total(self) -> int:
        """Of the rank."""
        state = self.parameters + self.gradients + self.optimizer + self.averages
        return self.program + state + self.activations + self.staging

    def to_json(self) -> dict[str, Any]:
        """With the total."""
        return {**asdict(self), "total": self.total}


def footprints(weighed: Mapping[int, Weighed], ranks: int, samples: Mapping[int, int], program: int) -> list[Footprint]:
    """Of every plan, those first that change least: whole models before cut ones, whole states before sharded ones.

    Args:
        weighed: by the size of the tensor group; sizes that cannot be are left out.
        ranks: of the run.
        samples: of a rank's largest micro-batch, by the size of the tensor group.
        program: bytes of a process without a model.
    """
    found = []
    for tensor, model in sorted(weighed.items()):
        data = ranks // tensor
        share = model.largest_share if data > 1 and tensor == 1 else None  # they are refused together
        for shard in ("none", "optimizer") if share is not None else ("none",):
            found.append(
                Footprint(
                    Plan(tensor, data, shard),
                    program,
                    model.parameters,
                    model.gradients,
                    math.ceil(model.optimizer * share)
                    if share is not None and shard == "optimizer"
                    else model.optimizer,
                    model.averages,
                    round(model.activations * samples[tensor]),
                    -(-model.checkpoint // ranks),
                    model.checkpoint,
                )
            )
    return found


def cheapest(found: Sequence[Footprint], limit: int) -> Footprint | None:
    """The first that fits into a rank's memory."""
    return next((one for one in found if one.total <= limit), None)

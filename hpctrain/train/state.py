"""Where a run stands, and the named tensors that make it up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.pipeline import Batch


@dataclasses.dataclass
class TrainState:
    """Position of a run; the same on every rank, and JSON in a checkpoint."""

    step: int = 0
    """Updates done."""
    epoch: int = 0
    """Passes over the data completed."""
    batch: int = 0
    """Global batches of the current epoch done."""
    samples: int = 0
    """Samples seen by all ranks together."""

    def advance(self, batch: Batch) -> None:
        """One more update, over this global batch, is done."""
        self.step += 1
        self.samples += batch.global_samples
        self.epoch, self.batch = (batch.epoch + 1, 0) if batch.ends_epoch else (batch.epoch, batch.index + 1)

    def to_json(self) -> dict[str, Any]:
        """All fields, JSON-able."""
        return dataclasses.asdict(self)

    def restore(self, saved: dict[str, Any]) -> None:
        """Takes over a saved position.

        Args:
            saved: what ``to_json`` gave; further keys, which earlier versions wrote, are ignored.
        """
        for key in dataclasses.asdict(self):
            setattr(self, key, saved[key])


class Placement(StrEnum):
    """How a piece of state relates to the ranks."""

    REPLICATED = "replicated"
    """Equal on every rank: parameters, optimizer, EMA, loss scale."""
    RANK = "rank"
    """Each rank's own: random states, BatchNorm statistics unless they are joined."""
    FIRST = "first"
    """Rank 0's, which all ranks take over at a resume: state of hooks and of a task's own objects."""
    CUT = "cut"
    """A part of a tensor that no rank holds whole; ``StateTensor.cut`` says which."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where the values of a rank lie in a tensor that is cut over several."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    begin: tuple[int, ...]
    """Index, in the whole tensor, of the first value here, in every axis."""
    copy: int = 0
    """Which one of the ranks that hold exactly this part this is; they share the writing of it."""
    copies: int = 1
    """How many there are."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a tensor is cut over ranks by plans that cut it."""

    axis: int
    parts: int = 1
    """Equal ones along the axis, each of which is cut by itself."""


class StateTensor(Protocol):
    """One named tensor of the state, wherever it lives."""

    @property
    def name(self) -> str:
        """Slash-separated, and independent of the framework if both know the thing: ``model/dense/kernel``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank holds."""

    @property
    def dtype(self) -> str:
        """Logical NumPy name, or ``bfloat16`` (held as uint16)."""

    @property
    def placement(self) -> Placement:
        """Whether ranks share it."""

    @property
    def cut(self) -> Cut | None:
        """Where it lies in the whole tensor if the placement is CUT; else None."""

    @property
    def is_trained(self) -> bool:
        """Whether updates change it, so that a value that is not finite means that training went wrong."""

    @property
    def tiling(self) -> Tiling | None:
        """Where other plans may cut it: it is written in tiles that end there. None: it is written as it is."""

    def copy_into(self, out: NDArray[Any], begin: Sequence[int] = ()) -> None:
        """Copies a part of the value, which has the shape of a host array, to that (uint16 for bfloat16).

        May be asynchronous on devices: call the framework's ``synchronize`` after the last.

        Args:
            out: where to.
            begin: index of the part's first value in every axis; by default the part is the whole value.
        """


def part_of(begin: Sequence[int], shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of a part of an array, by that of its first value and its shape; of all of it without the first."""
    return (..., *map(slice, begin, map(int.__add__, begin, shape)))


@dataclasses.dataclass(frozen=True)
class ArrayTensor:
    """A StateTensor over a host array."""

    name: str
    array: NDArray[Any]
    placement: Placement = Placement.REPLICATED
    logical_dtype: str | None = None
    is_trained: bool = False
    cut: Cut | None = None
    tiling: Tiling | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    @cached_property  # NumPy looks names up again each time
    def dtype(self) -> str:
        """Logical dtype."""
        return self.logical_dtype or self.array.dtype.name

    def copy_into(self, out: NDArray[Any], begin: Sequence[int] = ()) -> None:
        np.copyto(out, self.array[part_of(begin, out.shape)], casting="no")

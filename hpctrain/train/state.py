"""The position of a run, and the named tensors that make up its state."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from hpctrain.data.pipeline import Batch
from hpctrain.system.array_types import Array


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
        """Counts one more update, over this global batch."""
        self.step += 1
        self.samples += batch.global_samples
        self.epoch, self.batch = (batch.epoch + 1, 0) if batch.ends_epoch else (batch.epoch, batch.index + 1)

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, JSON-able."""
        return dataclasses.asdict(self)

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores a saved position.

        Args:
            saved: what ``to_json`` returned; extra keys, written by earlier versions, are ignored.
        """
        for key in dataclasses.asdict(self):
            setattr(self, key, saved[key])


class Placement(StrEnum):
    """How a tensor of the state is distributed over the ranks."""

    REPLICATED = "replicated"
    """Equal on every rank: parameters, optimizer state, EMA, loss scale."""
    RANK = "rank"
    """Different on each rank: random states, BatchNorm statistics unless they are synchronised."""
    FIRST = "first"
    """Saved by rank 0 and restored on all ranks: state of hooks and of a task's own objects."""
    CUT = "cut"
    """A shard: no rank holds the whole tensor; ``StateTensor.cut`` says which part this is."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """The place of a rank's shard in a tensor that is split over several ranks."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: tuple[int, ...]
    """Index of the shard's first value in the whole tensor, per axis."""
    copy: int = 0
    """Index of this rank among those that hold exactly this part; they split the work of writing it."""
    copies: int = 1
    """Number of ranks that hold exactly this part."""
    stages: tuple[int, ...] = ()
    """Pipeline stages of these ranks: as many ranks of other stages may hold other parts."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How parallel plans may split a tensor over ranks."""

    axis: int
    parts: int = 1
    """Number of equal parts along the axis, each of which is split separately (fused weights)."""


@dataclasses.dataclass(frozen=True)
class StateTensor(abc.ABC):
    """One named tensor of the state, wherever it lives."""

    name: str
    """Slash-separated, and the same in both frameworks where both have it: ``model/dense/kernel``."""
    value: Any
    """An array, tensor or variable."""
    placement: Placement = Placement.REPLICATED
    """How it is distributed over the ranks."""
    is_trained: bool = False
    """Whether updates change it, so that a non-finite value means that training went wrong."""
    cut: Cut | None = None
    """Its place in the whole tensor if the placement is CUT; else None."""
    tiling: Tiling | None = None
    """Where other plans may split it, so that it is written in tiles ending there. None: it is written whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        return tuple(self.value.shape)

    @property
    @abc.abstractmethod
    def dtype(self) -> str:
        """Logical NumPy dtype name, or ``bfloat16`` (held as uint16)."""

    @abc.abstractmethod
    def copy_into(self, out: Array, begin: Sequence[int] = ()) -> None:
        """Copies the value, or the part of it with the shape of ``out``, to a host array (uint16 for bfloat16).

        May be asynchronous on devices: call the framework's ``synchronize`` after the last copy.

        Args:
            out: the array to copy to.
            begin: index of the part's first value, per axis; by default, the whole value is copied.
        """


def part_of(begin: Sequence[int], shape: Sequence[int]) -> tuple[Any, ...]:
    """Index of the part of an array with this first index and shape; of the whole array if ``begin`` is empty."""
    return (..., *map(slice, begin, map(int.__add__, begin, shape)))


@dataclasses.dataclass(frozen=True)
class ArrayTensor(StateTensor):
    """A StateTensor over a host array."""

    logical_dtype: str | None = None

    @cached_property  # NumPy recomputes dtype names on each access
    def dtype(self) -> str:
        """Logical dtype."""
        return self.logical_dtype or str(self.value.dtype.name)

    def copy_into(self, out: Array, begin: Sequence[int] = ()) -> None:
        np.copyto(out, self.value[part_of(begin, out.shape)], casting="no")


def all_finite(values: Array, dtype: str) -> bool:
    """Whether all values of an array of this logical dtype are finite."""
    if dtype == "bfloat16":
        return not np.any(values & 0x7F80 == 0x7F80)  # all exponent bits are set in infinity and NaN
    with np.errstate(all="ignore"):  # a sum runs at memory speed and propagates NaN and infinity
        total = np.add.reduce(values, axis=None, dtype=np.float32 if dtype == "float16" else None)
    return bool(np.isfinite(total)) or bool(np.isfinite(values).all())

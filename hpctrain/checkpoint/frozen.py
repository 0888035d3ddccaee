"""Frozen weights that a run's checkpoints leave in their source (``checkpoint.frozen: source``)."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.format.durable_files import crc32, reading_error
from hpctrain.checkpoint.format.layout import ITEM_TYPES, DamagedCheckpoint, convert_values
from hpctrain.checkpoint.lora import Weights
from hpctrain.checkpoint.read_retry import retry_read
from hpctrain.checkpoint.weight_files import MODEL
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.system.json_shape import maker
from hpctrain.train.saved_arrays import DerivedArrays, Place, SavedArrays, runs_of_rows
from hpctrain.train.state import Placement, StateTensor

FROZEN = "frozen"
"""Key of the record in a checkpoint's meta."""
BLOCK_BYTES = 4 << 20
"""Bytes of a weight in memory at a time, unless a row is larger."""
RESTORE = "restore it, or link its copy to this path; a resumed run also takes a new path from checkpoint.init_from"
SAMPLE_BYTES = 64 << 10
"""Bytes of each weight that every save compares with those at the start, unless rows are larger."""
SAMPLES = 4
"""Places in a weight at which these are: its first rows, its last, and two between."""


@dataclass(frozen=True)
class FrozenWeight:
    """A weight in the source."""

    there: str
    """Its name there."""
    shape: tuple[int, ...]
    dtype: str
    """Logical type in the model, to which its values are converted."""
    crc32: str
    """Checksum of its values in the source, as 8 hex digits."""


@dataclass(frozen=True)
class FrozenRecord:
    """What a checkpoint records of the weights that it left in their source."""

    init_from: str
    """The source, as the run file named it."""
    path: str
    """Absolute path of the file, of the Hugging Face model folder, or of one checkpoint."""
    weights: Mapping[str, FrozenWeight]
    """By name in the checkpoint."""

    @classmethod
    def of(cls, meta: Mapping[str, Any], where: Path) -> FrozenRecord:
        """The record in the meta of a checkpoint, which is in the folder ``where``. Raises DamagedCheckpoint."""
        try:
            record = _record_of(meta[FROZEN])
            if unknown := {one.dtype for one in record.weights.values()} - ITEM_TYPES.keys():
                raise ValueError(f"unknown type {min(unknown)[:50]!r}")
        except ValueError as error:
            raise DamagedCheckpoint(f"{where}, {FROZEN}: {error}") from error
        return record

    def moved(self, init_from: str | None) -> FrozenRecord:
        """The record if the run file now names this source."""
        if init_from is None or init_from == self.init_from:
            return self
        return replace(self, init_from=init_from, path=os.path.abspath(init_from))


_record_of = maker(FrozenRecord)


def checksum(arrays: SavedArrays, name: str) -> str:
    """Checksum of a weight's values, as 8 hex digits."""
    shape, total = arrays.shape_of(name), 0
    if not shape:
        return f"{crc32(arrays[name].tobytes()):08x}"
    row_bytes = arrays.dtype_of(name).itemsize * math.prod(shape[1:])
    for first, count in runs_of_rows(shape, row_bytes, BLOCK_BYTES):
        rows = arrays.part(name, (first, *[0] * (len(shape) - 1)), (count, *shape[1:]))
        total = crc32(np.ascontiguousarray(rows).data, total)
    return f"{total:08x}"


def is_common(name: str, placement: Placement) -> bool:
    """Whether a tensor is one of the model, of which all ranks have the only value, or parts of it."""
    return name.startswith(MODEL) and placement in (Placement.REPLICATED, Placement.CUT)


def require_there(path: str) -> None:
    """Raise UserError if the source does not exist, UnreadableCheckpoint if that is unknown now."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"{path}, in which checkpoints left the frozen weights, does not exist"
        raise UserError(what, RESTORE) from error
    except OSError as error:
        raise reading_error(error, Path(path)) from error


class FrozenSource(SavedArrays):
    """Frozen weights, read from their source, which is opened and verified at the first access.

    Args:
        record: which weights, where, and their checksums.
        share: this process verifies every ``share[1]``-th weight, from number ``share[0]`` on.
        opening: ``opening(path, stack)`` opens the source's weights until the stack is closed.

    Access raises UserError if the source is missing or has other values.
    """

    named: Mapping[str, FrozenWeight]

    def __init__(
        self,
        record: FrozenRecord,
        share: tuple[int, int],
        opening: Callable[[str, ExitStack], Weights],
    ) -> None:
        super().__init__(record.weights)
        self.record = record
        self.share = share
        self.opening = opening
        self.stack = ExitStack()
        weakref.finalize(self, self.stack.close)

    def complete(self, arrays: SavedArrays) -> SavedArrays:
        """A checkpoint's arrays, and these weights."""
        places: dict[str, Place] = {name: (arrays, name) for name in arrays}
        return DerivedArrays({name: (self, name) for name in self.named} | places)

    def dtypes(self) -> dict[str, str]:
        """Logical types by name."""
        return {name: one.dtype for name, one in self.named.items()}

    @cached_property
    def weights(self) -> Weights:
        """The source's weights, once this process's share of them has been verified."""
        path = self.record.path
        retry_read(partial(require_there, path))
        weights = self.opening(path, self.stack)
        first, step = self.share
        for one in list(self.named.values())[first::step]:
            is_there = one.there in weights.arrays and weights.arrays.shape_of(one.there) == one.shape
            if not is_there or checksum(weights.arrays, one.there) != one.crc32:
                what = f"{path} has changed since the run began: {one.there} is not what checkpoints left in it"
                raise UserError(what, RESTORE)
        return weights

    def verify(self) -> None:
        """Verify this process's share of the weights, which a rank that reads none must do too."""
        assert self.weights

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.named[name].shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return ITEM_TYPES[self.named[name].dtype]

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        one, (arrays, dtypes) = self.named[name], self.weights
        return convert_values(arrays.part(one.there, begin, shape), dtypes[one.there], one.dtype)


class LeftOut:
    """Chooses what a run's checkpoints leave out: frozen weights that still have the values of their source.

    What the task itself changes, such as a target network, is saved from then on; so is what a resumed run trains.

    Args:
        record: the weights in the source, whose values the model has now.
        tensors: the state.
        synchronize: waits until asynchronous copies have completed.
    """

    def __init__(self, record: FrozenRecord, tensors: Iterable[StateTensor], synchronize: Callable[[], None]) -> None:
        self.record = record
        self.synchronize = synchronize
        self.samples = self._samples(tensors)

    def update(self, tensors: Sequence[StateTensor], allgather: Callable[[list[str], str], list[list[str]]]) -> None:
        """Find what has changed. Collective."""
        now = self._samples(tensors)
        changed = [name for name in now if None in now[name] or now[name] != self.samples[name]]
        every = allgather(changed, "compare the frozen weights")
        left = {name: one for name, one in self.record.weights.items() if not any(name in each for each in every)}
        self.record = replace(self.record, weights=left)

    def without(self, tensors: Iterable[StateTensor]) -> list[StateTensor]:
        """The tensors that are saved."""
        return [tensor for tensor in tensors if tensor.is_trained or tensor.name not in self.record.weights]

    def _samples(self, tensors: Iterable[StateTensor]) -> dict[str, list[int | None]]:
        """Checksums of some rows of each of this rank's parts, by name; None for what is trained."""
        taken: list[tuple[str, Array | None]] = []
        for tensor in tensors:
            if tensor.name not in self.record.weights:
                continue
            out = None
            if not tensor.is_trained:
                shape, item = tensor.shape or (1,), ITEM_TYPES[tensor.dtype]
                rows = max(1, SAMPLE_BYTES // SAMPLES // max(1, item.itemsize * math.prod(shape[1:])))
                is_whole = shape[0] <= SAMPLES * rows
                begins = [0] if is_whole else [(shape[0] - rows) * at // (SAMPLES - 1) for at in range(SAMPLES)]
                out = np.empty((len(begins), shape[0] if is_whole else rows, *shape[1:]), item)
                for begin, part in zip(begins, out, strict=True):
                    tensor.copy_into(part.reshape(tensor.shape) if is_whole else part, (begin, *[0] * (len(shape) - 1)))
            taken.append((tensor.name, out))
        self.synchronize()
        samples: dict[str, list[int | None]] = {}
        for name, out in taken:
            samples.setdefault(name, []).append(None if out is None else crc32(out.tobytes()))
        return samples

"""What every dataset offers, the checks that all kinds share, and the simplest kind: arrays in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UserError

Samples = dict[str, NDArray[Any]]
"""Arrays by field name, each with the samples along its first axis."""

FINGERPRINT_SAMPLES = 64
FINGERPRINT_BYTES = 16 * 2**20
_READING = threading.Lock()


@dataclass(frozen=True)
class Field:
    """One array of every sample."""

    shape: tuple[int, ...]
    """Of one sample: without the sample axis."""
    dtype: np.dtype[Any]
    """A number or boolean, in this machine's byte order."""

    @property
    def num_bytes(self) -> int:
        """Of one sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@runtime_checkable
class Dataset(Protocol):
    """Samples with random access. Read from one thread at a time."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of a sample, in a fixed order: models get the first by default."""

    def __len__(self) -> int:
        """Number of samples, at least 1."""

    def read(self, indices: NDArray[np.int64]) -> Samples:
        """New, writable, C-contiguous arrays of shape ``[len(indices), *field.shape]``, in the order of the indices.

        Args:
            indices: int64[n], each 0 to ``len(self) - 1``, in any order, repeats allowed.

        Raises:
            UserError: the source does not deliver what it promised; names it and the sample.
        """

    def fingerprint(self) -> str:
        """Identifies the data wherever it lies, cheaply: see docs/data.md."""


def read_exclusively(dataset: Dataset, indices: NDArray[np.int64]) -> Samples:
    """Its ``read``, while no other thread reads any: training and validation data may be parts of one source."""
    with _READING:
        return dataset.read(indices)


class ArrayDataset:
    """Arrays with a common sample axis. Use ``from_arrays``, which checks them."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], fields: Mapping[str, Field]) -> None:
        self.arrays = arrays
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: NDArray[np.int64]) -> Samples:
        """See Dataset."""
        return {name: array.take(indices, axis=0) for name, array in self.arrays.items()}

    def fingerprint(self) -> str:
        """See Dataset."""
        return content_fingerprint(self)


def from_arrays(arrays: Mapping[str, Any], where: str = "the dict of arrays") -> ArrayDataset:
    """A dataset of array-likes that share their first axis; NumPy arrays are not copied.

    Raises:
        UserError: an array has no sample axis, holds no numbers, or is not as long as the others.
    """
    native = {name: np.asarray(array) for name, array in arrays.items()}
    fields = {name: check_field(name, array.shape, array.dtype, where) for name, array in native.items()}
    check_lengths({name: len(array) for name, array in native.items()}, where)
    return ArrayDataset({name: array.astype(fields[name].dtype, copy=False) for name, array in native.items()}, fields)


def check_field(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> Field:
    """The field of an array of this whole shape; raises UserError where it cannot be trained on."""
    if not shape:
        raise UserError(
            f"{where}: {name!r} is a single value, without a sample axis",
            "store one value per sample, or name only the arrays to use",
        )
    if dtype.kind not in "biufc":
        raise UserError(
            f"{where}: {name!r} has dtype {dtype}, which is not a number",
            "store numbers (encode text and objects first), or name only the arrays to use",
        )
    return Field(tuple(shape[1:]), dtype.newbyteorder("="))


def check_lengths(lengths: Mapping[str, int], where: str) -> int:
    """The common length of all arrays; raises UserError where there is none, or no sample at all."""
    if not lengths:
        raise UserError(f"{where} holds no arrays", "give arrays whose first axis runs over the samples")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise UserError(
            f"{where}: the arrays have different numbers of samples: {listed}",
            "make them equally long, or name only the arrays that belong together",
        )
    length = next(iter(lengths.values()))
    if length == 0:
        raise UserError(f"{where} holds no samples: its arrays are empty", "give data with at least one sample")
    return length


def choose(present: Mapping[str, Any] | list[str], wanted: tuple[str, ...] | None, where: str) -> tuple[str, ...]:
    """The wanted names, by default all; raises UserError naming what is there where one is missing."""
    names = tuple(present)
    if wanted is None:
        return names
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(
            f"{where} has no {' or '.join(map(repr, missing))}",
            f"it has {', '.join(names) or 'nothing'}: name one of them",
        )
    return tuple(wanted)


def content_fingerprint(dataset: Dataset) -> str:
    """sha256 of the fields, the length, and the bytes of up to 64 samples spread evenly over the dataset."""
    digest = hashlib.sha256()
    digest.update(f"{len(dataset)}".encode())
    for name, field in dataset.fields.items():
        digest.update(f"\n{name} {field.shape} {field.dtype.str}".encode())
    sample_bytes = max(1, sum(field.num_bytes for field in dataset.fields.values()))
    count = min(len(dataset), FINGERPRINT_SAMPLES, max(2, FINGERPRINT_BYTES // sample_bytes))
    for array in dataset.read(np.linspace(0, len(dataset) - 1, count).astype(np.int64)).values():
        digest.update(array.tobytes())
    return digest.hexdigest()

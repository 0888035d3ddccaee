"""What every dataset offers, the checks that all kinds share, and the simplest kind: arrays in memory."""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UserError, foreign_errors

Samples = dict[str, NDArray[Any]]
"""Arrays by field name, each with the samples along its first axis. Of a field whose samples differ in shape: an array
of dtype object, whose items are the samples' arrays."""

FINGERPRINT_SAMPLES = 64
FINGERPRINT_BYTES = 16 * 2**20
_READING = threading.Lock()


@dataclass(frozen=True)
class Field:
    """One array of every sample."""

    shape: tuple[int, ...]
    """Of one sample: without the sample axis; -1 along axes in which samples differ."""
    dtype: np.dtype[Any]
    """A number or boolean, in this machine's byte order."""

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in shape."""
        return -1 in self.shape

    @property
    def num_bytes(self) -> int:
        """Of one sample; of a ragged one at least."""
        return abs(int(np.prod(self.shape, dtype=np.int64))) * self.dtype.itemsize

    def holds(self, array: NDArray[Any]) -> bool:
        """Whether this is an array of one sample."""
        if self.dtype != array.dtype or len(self.shape) != array.ndim:
            return False
        return all(expected in (-1, found) for expected, found in zip(self.shape, array.shape, strict=True))

    def make_rows(self, number: int) -> NDArray[Any]:
        """Room for this number of samples; a row of a ragged field takes an array."""
        if self.is_ragged:
            return np.empty(number, object)
        return np.empty((number, *self.shape), self.dtype)


@runtime_checkable
class Dataset(Protocol):
    """Samples with random access. Read from one thread at a time."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of a sample, in a fixed order: models get the first by default."""

    def __len__(self) -> int:
        """Number of samples, at least 1."""

    def read(self, indices: NDArray[np.int64]) -> Samples:
        """New, writable, C-contiguous arrays of shape ``[len(indices), *field.shape]``, in the order of the indices; of
        a ragged field an array of dtype object and shape ``[len(indices)]``, which holds the samples' arrays.

        Args:
            indices: int64[n], each 0 to ``len(self) - 1``, in any order, repeats allowed.

        Raises:
            UserError: the source does not deliver what it promised; names it and the sample.
        """

    def fingerprint(self) -> str:
        """Identifies the data wherever it lies, cheaply: see docs/data.md."""


@runtime_checkable
class SeededDataset(Dataset, Protocol):
    """A dataset that may draw from the process's global random generators while it reads.

    They belong to the whole process, so it is read by the thread that trains, or in worker processes.
    """

    def read_seeded(self, indices: NDArray[np.int64], seeds: NDArray[np.int64]) -> Samples:
        """As ``read``, with all global generators (Python's, NumPy's, torch's on the CPU) seeded before each sample.

        Args:
            indices: see ``read``.
            seeds: int64[len(indices)], at least 0. Afterwards the generators are what they were before.
        """


def read_exclusively(dataset: Dataset, indices: NDArray[np.int64], seeds: Callable[[], NDArray[np.int64]]) -> Samples:
    """Its samples, while no other thread reads any: training and validation data may be parts of one source."""
    with _READING:
        if isinstance(dataset, SeededDataset):
            return dataset.read_seeded(indices, seeds())
        return dataset.read(indices)


class ArrayDataset:
    """Arrays with a common sample axis. Use ``from_arrays``, which checks them."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], fields: Mapping[str, Field]) -> None:
        self.arrays = arrays
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: NDArray[np.int64]) -> Samples:
        rows = {name: array.take(indices, axis=0) for name, array in self.arrays.items()}
        return {
            name: ragged_rows([np.array(item) for item in row]) if row.dtype == object else row
            for name, row in rows.items()
        }

    def fingerprint(self) -> str:
        return content_fingerprint(self)


def from_arrays(arrays: Mapping[str, Any], where: str = "the dict of arrays") -> ArrayDataset:
    """A dataset of array-likes that share their first axis; NumPy arrays are not copied.

    A list of arrays that differ in shape makes a ragged field.

    Raises:
        UserError: an array has no sample axis, holds no numbers, or is not as long as the others.
    """
    native = {name: as_rows(array) for name, array in arrays.items()}
    fields = {name: field_of(name, array, where) for name, array in native.items()}
    check_lengths({name: len(array) for name, array in native.items()}, where)
    return ArrayDataset({name: in_dtype(array, fields[name]) for name, array in native.items()}, fields)


def as_rows(values: Any) -> NDArray[Any]:
    """An array; of dtype object, holding arrays, if the values differ in shape."""
    try:
        array = np.asarray(values)
    except ValueError:  # NumPy's word for it
        array = ragged_rows(list(values))
    if array.dtype == object and array.ndim == 1 and all(isinstance(item, (np.ndarray, list)) for item in array):
        return ragged_rows([np.asarray(item) for item in array])
    return array


def ragged_rows(items: Sequence[Any]) -> NDArray[Any]:
    """An array of dtype object that holds the items as arrays."""
    rows = np.empty(len(items), object)
    for row, item in enumerate(items):
        rows[row] = np.asarray(item)
    return rows


def field_of(name: str, array: NDArray[Any], where: str) -> Field:
    """The field of an array with a sample axis; raises UserError if it cannot be trained on."""
    if array.dtype != object or array.ndim != 1 or not all(isinstance(item, np.ndarray) for item in array):
        return check_field(name, array.shape, array.dtype, where)
    full = [item for item in array if item.size] or list(array)
    dtype = np.result_type(*{item.dtype for item in full}) if full else np.dtype(np.float64)
    axes = {item.ndim for item in array}
    if len(axes) > 1:
        raise UserError(
            f"{where}: the samples of {name!r} have {min(axes)} to {max(axes)} axes", "give all the same number of axes"
        )
    shapes = list(zip(*(item.shape for item in array), strict=True))
    shape = tuple(lengths[0] if len(set(lengths)) == 1 else -1 for lengths in shapes)
    if -1 not in shape:
        shape = (-1, *shape[1:])  # rows of dtype object stay so
    return check_field(name, (len(array), *shape), dtype, where)


def in_dtype(array: NDArray[Any], field: Field) -> NDArray[Any]:
    """The array, or each of those that it holds, in the field's dtype."""
    if not field.is_ragged:
        return array.astype(field.dtype, copy=False)
    return ragged_rows([item.astype(field.dtype, copy=False) for item in array])


def check_field(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> Field:
    """The field of an array of this whole shape; raises UserError if it cannot be trained on."""
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
    """The common length of all arrays; raises UserError if there is none, or no sample at all."""
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
    """The wanted names, by default all; raises UserError naming what is there if one is missing."""
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
        for part in array if array.dtype == object else [array]:
            digest.update(part.tobytes() if part is array else f"{part.shape}".encode() + part.tobytes())
    return digest.hexdigest()


def with_place(error: BaseException) -> str:
    """The error and where it arose: ``ValueError: bad angle (augment.py:12 in rotate)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def users_code(what: str, fix: str) -> AbstractContextManager[None]:
    """Errors in the body, which runs code of the user's, become UserErrors: ``what``, the error and its place."""
    return foreign_errors(lambda error: UserError(f"{what}: {with_place(error)}", fix))

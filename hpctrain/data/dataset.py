"""The Dataset protocol, checks that all datasets share, and the simplest dataset: arrays in memory."""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hpctrain.errors import UserError, foreign_errors, refusal
from hpctrain.system.array_types import Array, Ints

Samples = dict[str, Array]
"""Arrays by field name, with the samples along the first axis. A ragged field, whose samples differ in shape, is an
array of dtype object that holds one array per sample."""

FINGERPRINT_SAMPLES = 64
FINGERPRINT_BYTES = 16 * 2**20
_READING = threading.Lock()


@dataclass(frozen=True)
class Field:
    """Shape and dtype of one of a sample's arrays."""

    shape: tuple[int, ...]
    """Shape of one sample, without the sample axis; -1 along axes whose length varies."""
    dtype: np.dtype[Any]
    """Numeric or boolean, in native byte order."""

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in shape."""
        return -1 in self.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample; a lower bound if the field is ragged."""
        return abs(int(np.prod(self.shape, dtype=np.int64))) * self.dtype.itemsize

    def holds(self, array: Array) -> bool:
        """Whether the array has this field's shape and dtype."""
        if self.dtype != array.dtype or len(self.shape) != array.ndim:
            return False
        return all(expected in (-1, found) for expected, found in zip(self.shape, array.shape, strict=True))

    def make_rows(self, number: int) -> Array:
        """An uninitialized array for this number of samples, of dtype object if the field is ragged."""
        if self.is_ragged:
            return np.empty(number, object)
        return np.empty((number, *self.shape), self.dtype)


@runtime_checkable
class Dataset(Protocol):
    """Samples with random access. Only one thread reads at a time."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of a sample, in a fixed order: by default, models get the first."""

    def __len__(self) -> int:
        """Number of samples, at least 1."""

    def read(self, indices: Ints) -> Samples:
        """Return the samples as new, writable, C-contiguous arrays of shape ``[len(indices), *field.shape]``, in the
        order of the indices; for a ragged field, as an array of dtype object and shape ``[len(indices)]``.

        Args:
            indices: int64[n], each 0 to ``len(self) - 1``, in any order, repeats allowed.

        Raises:
            UserError: a sample cannot be read or does not match ``fields``; names the source and the sample.
        """

    def fingerprint(self) -> str:
        """A cheap identifier of the content, independent of its location: see docs/data.md."""


@runtime_checkable
class SeededDataset(Dataset, Protocol):
    """A dataset that may draw from the process's global random generators while it reads.

    The model shares these generators, so only the training thread or worker processes read such a dataset.
    """

    def read_seeded(self, indices: Ints, seeds: Ints) -> Samples:
        """Like ``read``, with all global generators (Python, NumPy, torch on the CPU) seeded before each sample.

        The generators' previous states are restored afterwards.

                Args:
                    indices: see ``read``.
                    seeds: int64[len(indices)], at least 0.
        """


def is_ordered(dataset: Any) -> bool:
    """Whether the order of a dataset's fields is the user's or the file's own, rather than an alphabetical listing."""
    return bool(getattr(getattr(dataset, "dataset", dataset), "ordered", True))


def read_exclusively(dataset: Dataset, indices: Ints, seeds: Callable[[], Ints]) -> Samples:
    """Read under a process-wide lock: training and validation data may share one source."""
    with _READING:
        if isinstance(dataset, SeededDataset):
            return dataset.read_seeded(indices, seeds())
        return dataset.read(indices)


@dataclass(eq=False)
class ArrayDataset:
    """Arrays in memory with a common sample axis. Create it with ``from_arrays``, which checks the arrays."""

    arrays: Mapping[str, Array]
    fields: Mapping[str, Field]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: Ints) -> Samples:
        found = {}
        for name, array in self.arrays.items():
            rows = array.take(indices, axis=0)
            found[name] = ragged_rows(list(map(np.array, rows))) if rows.dtype == object else rows
        return found

    def fingerprint(self) -> str:
        return content_fingerprint(self)


def from_arrays(arrays: Mapping[str, Any], where: str = "the dict of arrays") -> ArrayDataset:
    """Make a dataset of array-likes that share their first axis; NumPy arrays are not copied.

    A list of arrays that differ in shape makes a ragged field.

    Raises:
        UserError: an array has no sample axis, holds no numbers, or is not as long as the others.
    """
    native = {name: as_rows(array, f"{where}: {name!r}") for name, array in arrays.items()}
    fields = {name: field_of(name, array, where) for name, array in native.items()}
    check_lengths({name: len(array) for name, array in native.items()}, where)
    return ArrayDataset({name: in_dtype(array, fields[name]) for name, array in native.items()}, fields)


def plain(values: Any, what: str) -> Array:
    """The values as an array; raises UserError if ``what`` masks some, which NumPy would pass on as they are, or holds
    integers that no type can hold together."""
    hidden = int(np.ma.getmaskarray(values).sum()) if isinstance(values, np.ma.MaskedArray) else 0
    if hidden:
        shown = f"{hidden} of {values.size} values are masked, the first is {values.data[values.mask].flat[0]}"
        raise UserError(
            f"{what} is a masked array: {shown}", "fill them: array.filled(0), and give the mask as a separate array"
        )
    array = np.asarray(values.detach() if hasattr(values, "detach") else values)  # torch refuses if it has a gradient
    if isinstance(values, (list, tuple)) and array.dtype == np.float64 and np.abs(array).max(initial=0) >= 2**63:
        exact = np.asarray(values, object)
        if all(isinstance(each, int) for each in exact.flat):  # NumPy has rounded int64 next to uint64
            if exact.min() < 0:
                whole = f"{what} holds integers below 0 and from 2**63 on, which no integer type can hold together"
                raise UserError(whole, "give all of them as int64 or as uint64, or write floats such as 1e19")
            return exact.astype(np.uint64)
    return array


def as_rows(values: Any, what: str = "an array") -> Array:
    """The values as an array; an object array of arrays if they differ in shape."""
    if isinstance(values, (list, tuple)):
        values = [plain(each, what) if isinstance(each, np.ma.MaskedArray) else each for each in values]
    try:
        array = plain(values, what)
    except ValueError:  # NumPy's error for values that differ in shape
        array = ragged_rows(list(values))
    if array.dtype == object and array.ndim == 1 and all(isinstance(item, (np.ndarray, list)) for item in array):
        return ragged_rows([np.asarray(item) for item in array])
    return array


def ragged_rows(items: Sequence[Any]) -> Array:
    """A one-dimensional object array that holds each item as an array."""
    rows = np.empty(len(items), object)
    for row, item in enumerate(items):
        rows[row] = np.asarray(item)
    return rows


def field_of(name: str, array: Array, where: str) -> Field:
    """The field of an array with a sample axis; raises UserError if it cannot be trained on."""
    if array.dtype != object or array.ndim != 1 or not all(isinstance(item, np.ndarray) for item in array):
        return check_field(name, array.shape, array.dtype, where)
    full = [item for item in array if item.size] or list(array)
    dtype = np.result_type(*{item.dtype for item in full}) if full else np.dtype(np.float64)
    axes = {item.ndim for item in array}
    if len(axes) > 1:
        fix = "give all the same number of axes"
        raise UserError(f"{where}: the samples of {name!r} have {min(axes)} to {max(axes)} axes", fix)
    shapes = list(zip(*(item.shape for item in array), strict=True))
    shape = tuple(lengths[0] if len(set(lengths)) == 1 else -1 for lengths in shapes)
    if -1 not in shape:
        shape = (-1, *shape[1:])  # an object array stays ragged even if all its samples have the same shape
    return check_field(name, (len(array), *shape), dtype, where)


def in_dtype(array: Array, field: Field) -> Array:
    """Cast the array, or each array in a ragged one, to the field's dtype."""
    if not field.is_ragged:
        return array.astype(field.dtype, copy=False)
    return ragged_rows([item.astype(field.dtype, copy=False) for item in array])


def check_field(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> Field:
    """The field of an array of this shape, sample axis included; raises UserError if it cannot be trained on."""
    if not shape:
        fix = "store one value per sample, or name only the arrays to use; of a sparse matrix give .toarray()"
        raise UserError(f"{where}: {name!r} is a single value, without a sample axis", fix)
    if dtype.kind not in "biufc":
        fix = "store numbers (encode text and objects first), or name only the arrays to use"
        raise UserError(f"{where}: {name!r} has dtype {dtype}, which is not a number", fix)
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        fix = "convert it: array.astype(np.float64), or np.complex128"
        raise UserError(f"{where}: {name!r} has dtype {dtype}, wider than any that models compute in", fix)
    return Field(tuple(shape[1:]), dtype.newbyteorder("="))


def fields_like(sample: Mapping[str, Array], length: int, ragged: bool, where: str) -> dict[str, Field]:
    """The fields of ``length`` samples like this one, which may differ in shape if ``ragged``. Raises UserError."""
    shapes = {name: (-1,) * array.ndim if ragged else array.shape for name, array in sample.items()}
    return {name: check_field(name, (length, *shapes[name]), array.dtype, where) for name, array in sample.items()}


def check_lengths(lengths: Mapping[str, int], where: str) -> int:
    """The common length of all arrays; raises UserError if lengths differ or there are no samples."""
    if not lengths:
        raise UserError(f"{where} holds no arrays", "give arrays whose first axis runs over the samples")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        fix = "make them equally long, or name only the arrays that belong together"
        raise UserError(f"{where}: the arrays have different numbers of samples: {listed}", fix)
    length = next(iter(lengths.values()))
    if length == 0:
        raise UserError(f"{where} holds no samples: its arrays are empty", "give data with at least one sample")
    return length


def choose(present: Mapping[str, Any] | list[str], wanted: tuple[str, ...] | None, where: str) -> tuple[str, ...]:
    """The wanted names, by default all; if one is missing, raises UserError that lists those present."""
    names = tuple(present)
    if wanted is None:
        return names
    missing = [name for name in wanted if name not in names]
    if missing:
        fix = f"it has {', '.join(names) or 'nothing'}: name one of them"
        raise UserError(f"{where} has no {' or '.join(map(repr, missing))}", fix)
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
    """Format the error with its origin: ``ValueError: bad angle (augment.py:12 in rotate)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def users_code(what: str, fix: str) -> AbstractContextManager[None]:
    """Context manager for calls into user code: errors become a ``refusal`` with ``what``, the error and its origin."""
    return foreign_errors(lambda error: refusal(error, f"{what}: {with_place(error)}", fix))

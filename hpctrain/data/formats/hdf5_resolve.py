"""Decides how a dataset of an HDF5 file is read, and refuses one whose values are missing.

Missing data is an error and never read as zeros, as the library does for values that were never written, and for
sources of virtual datasets and external files that it does not find.
"""

from __future__ import annotations

import math
from collections.abc import Set
from pathlib import Path

import h5py

from hpctrain.data.formats.hdf5_arrays import MappedArray
from hpctrain.data.formats.hdf5_files import ELSEWHERE, Hdf5File
from hpctrain.errors import UserError

MOST_UNWRITTEN = 2**28
"""Limit on declared values of an array that were never written."""
COMPARED = 1024
"""Values per sample that are compared between the map and the library, in up to three samples."""


def resolve(file: Hdf5File, dataset: h5py.Dataset, what: str) -> MappedArray | None:
    """The map of a dataset's values; None if the library must read them.

    Args:
        file: holds the dataset; kept open if the library must read it.
        dataset: the dataset.
        what: its name, for errors.

    Raises:
        UserError: values are in other files, are missing, or were never written.
    """
    # Do not read even the shape before this: for some virtual datasets the library opens the sources to get it.
    properties = dataset.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL:
        raise UserError(f"{file.path}: {what} is a virtual dataset, whose values are in other files", ELSEWHERE)
    if properties.get_external_count():
        fix = "copy it into the file: h5repack -l CONTI"
        raise UserError(f"{file.path}: {what} has external storage: its values are in other files", fix)
    check_written(file.path, dataset, what)
    mapped = map_dataset(file, dataset)
    if mapped is not None:
        length = dataset.shape[0]
        if agrees(mapped, dataset, {0, length // 2, length - 1}):
            return mapped
    check_filters(file.path, dataset, what)
    file.keep()
    return None


def map_dataset(file: Hdf5File, dataset: h5py.Dataset) -> MappedArray | None:
    """The array mapped from its file; None if its bytes are not contiguous there in NumPy's layout."""
    if not dataset.shape or dataset.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS:
        return None
    num_bytes = dataset.size * dataset.dtype.itemsize
    written = num_bytes and dataset.id.get_storage_size() == num_bytes
    if not written or dataset.dtype.kind not in "biufc":
        return None
    as_numpy = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    return file.contiguous(dataset, int(dataset.id.get_offset())) if as_numpy else None


def agrees(mapped: MappedArray, dataset: h5py.Dataset, rows: Set[int]) -> bool:
    """Whether the library reads the same values in these rows; of large samples, only a part is compared."""
    for row in rows:
        inner = [slice(size // 2, size // 2 + 1) for size in mapped.shape[1:-1]]
        last = [slice(COMPARED) for _ in mapped.shape[1:][-1:]]
        box = (slice(row, row + 1), *inner, *last)
        if mapped.array[box].tobytes() != dataset[box].tobytes():
            return False
    return True


def check_written(path: Path, dataset: h5py.Dataset, what: str) -> None:
    """Raise UserError if an array declares far more values than were written, since the rest would read as zeros."""
    if dataset.size is None or dataset.size <= MOST_UNWRITTEN:
        return
    if dataset.chunks:
        written = dataset.id.get_num_chunks() * math.prod(dataset.chunks)
    else:
        written = dataset.size if dataset.id.get_storage_size() else 0
    if dataset.size - written > MOST_UNWRITTEN:
        raise UserError(
            f"{path}: {what} claims {dataset.shape[0]} samples, but of its {dataset.size} values "
            f"at most {written} were ever written",
            "write the file to its end, or name only the arrays to use",
        )


def check_filters(path: Path, dataset: h5py.Dataset, what: str) -> None:
    """Raise UserError if the array uses a compression filter that this HDF5 library lacks."""
    plist = dataset.id.get_create_plist()
    for index in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            raise UserError(
                f"{path}: {what} is compressed with {name.decode() or code}, which this HDF5 library lacks",
                "pip install hdf5plugin and import it in the task, or store the data uncompressed",
            )

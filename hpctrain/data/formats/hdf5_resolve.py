"""Resolves a dataset in an HDF5 file to the bytes of the files that hold its values.

Missing data is an error and never read as zeros: all sources of a virtual dataset are opened here, and external files
must be as long as declared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.data.formats.hdf5_arrays import (
    Array,
    Box,
    FileSegment,
    LibraryArray,
    MappedArray,
    MappedBytes,
    VirtualArray,
    aligned,
    beyond,
    boxes_of,
    slices,
)
from hpctrain.data.formats.hdf5_files import LinkedFiles
from hpctrain.data.formats.netcdf import meaning_of
from hpctrain.errors import UserError

MOST_UNWRITTEN = 2**28
"""Limit on declared values of an array that were never written."""
COMPARED = 1024
"""Values per sample that are compared between the map and the library, in up to three samples."""

Known = dict[int, Array | None]
"""Resolved arrays by dataset hash; None while a dataset's sources are being resolved."""


def resolve(files: LinkedFiles, dataset: h5py.Dataset, what: str, known: Known) -> Array:
    """The array that holds a dataset's values.

    Args:
        files: opens the files to which the dataset leads.
        dataset: a dataset in one of these files.
        what: its name, for errors.
        known: arrays resolved so far; updated in place.

    Raises:
        UserError: values are missing, were never written, or are in a file that may not be read.
    """
    key = hash(dataset.id)
    if key not in known:
        known[key] = None
        known[key] = resolve_new(files, dataset, what, known)
    array = known[key]
    if array is None:
        raise UserError(f"{files.path}: {what} is a source of itself", "make the virtual dataset again")
    return array


def resolve_new(files: LinkedFiles, dataset: h5py.Dataset, what: str, known: Known) -> Array:
    """Resolve a dataset by its storage layout."""
    if isinstance(dataset.id.get_type(), h5py.h5t.TypeTimeID):
        raise UserError(
            f"{files.path}: {what} is of HDF5's type H5T_TIME, which neither h5py nor NumPy can read",
            "write it as integers, such as int64 seconds since 1970, or name only the arrays to use",
        )
    # Do not read even the shape before this: for some virtual datasets the library opens the sources to get it.
    properties = dataset.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL:
        return resolve_virtual(files, dataset, what, known)
    if properties.get_external_count():
        return resolve_external(files, dataset, what)
    check_written(files.path, dataset, what)
    mapped = map_dataset(files, dataset)
    if mapped is not None:
        length = dataset.shape[0]
        rows = {0, length // 2, length - 1} if files.origin is None else {0}  # a store reads 8 MB per row
        if agrees(mapped, dataset, rows):
            return mapped
    check_filters(files.path, dataset, what)
    files.keep()
    return LibraryArray(dataset)


def map_dataset(files: LinkedFiles, dataset: h5py.Dataset) -> Array | None:
    """The array mapped from its file; None if its bytes are not contiguous there in NumPy's layout."""
    if not dataset.shape or dataset.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS:
        return None
    num_bytes = dataset.size * dataset.dtype.itemsize
    written = num_bytes and dataset.id.get_storage_size() == num_bytes
    if not written or not lies_as_numpy(dataset):
        return None
    begin = int(dataset.id.get_offset())
    return files.contiguous(dataset, begin, begin + num_bytes)


def lies_as_numpy(dataset: h5py.Dataset) -> bool:
    """Whether values are stored exactly as the NumPy dtype describes."""
    if dataset.dtype.kind not in "biufc":
        return False
    return bool(dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True))


def agrees(mapped: Array, dataset: h5py.Dataset, rows: Set[int]) -> bool:
    """Whether the library reads the same values in these rows; of large samples, only a part is compared."""
    for row in rows:
        inner = [range(size // 2, size // 2 + 1) for size in mapped.shape[1:-1]]
        last = [range(min(COMPARED, size)) for size in mapped.shape[1:][-1:]]
        box = (range(row, row + 1), *inner, *last)
        if mapped.read(box).tobytes() != dataset[slices(box)].tobytes():
            return False
    return True


def check_written(path: Path | str, dataset: h5py.Dataset, what: str) -> None:
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


def check_filters(path: Path | str, dataset: h5py.Dataset, what: str) -> None:
    """Raise UserError if the array uses a compression filter that this HDF5 library lacks."""
    plist = dataset.id.get_create_plist()
    for index in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            raise UserError(
                f"{path}: {what} is compressed with {name.decode() or code}, which this HDF5 library lacks",
                "pip install hdf5plugin and import it in the task, or store the data uncompressed",
            )


def resolve_external(files: LinkedFiles, dataset: h5py.Dataset, what: str) -> Array:
    """Resolve an array whose bytes are in external files, which are not HDF5."""
    missing = dataset.size * dataset.dtype.itemsize
    if not lies_as_numpy(dataset):
        fix = "copy it into the file: h5repack -l CONTI"
        raise UserError(f"{files.path}: {what} is in external files in a type that NumPy does not know", fix)
    parts = []
    for name, offset, size in dataset.external:
        if missing:
            path = files.locate(dataset.file, name, f"the external storage of {what}")
            end = offset + min(size, missing)
            if path.stat().st_size < end:
                raise UserError(
                    f"{files.path}: {what} is in {path}, which has {path.stat().st_size} bytes in place of {end}",
                    "copy or make that file again",
                )
            parts.append(MappedBytes(path, files.map(path), offset, end))
            missing -= end - offset
    if len(parts) != 1:
        fix = "copy it into the file: h5repack -l CONTI"
        raise UserError(f"{files.path}: {what} is in {len(parts)} external files, not in one", fix)
    return MappedArray(parts[0], dataset.shape, dataset.dtype)


def resolve_virtual(files: LinkedFiles, dataset: h5py.Dataset, what: str, known: Known) -> Array:
    """Resolve an array that is assembled from others, and each of these."""
    properties = dataset.id.get_create_plist()
    count = properties.get_virtual_count()
    names = [(properties.get_virtual_filename(at), properties.get_virtual_dsetname(at)) for at in range(count)]
    sources = {named: resolve_source(files, dataset, what, named, known) for named in dict.fromkeys(names)}
    shape = dataset.shape  # the library may open the sources for this, so only after they were checked
    pieces: list[FileSegment] = []
    for index, named in enumerate(names):
        target = boxes_of(properties.get_virtual_vspace(index), shape)
        source = boxes_of(properties.get_virtual_srcspace(index), sources[named].shape)
        label = f"{files.path}: {what} takes from {named[1]!r} of {named[0]}"
        if not target or not source:
            fix = "copy the array into a separate file with h5py"
            raise UserError(f"{label} a selection that is not of whole rows", fix)
        pairs = aligned(target, source)
        pieces += [fit(label, into, shape, out_of, sources[named], dataset.dtype) for into, out_of in pairs]
    pieces = [piece for piece in pieces if math.prod(map(len, piece.target))]
    check_cover(f"{files.path}: {what}", shape, pieces)
    return VirtualArray(shape, dataset.dtype, dataset.fillvalue, pieces)


def resolve_source(files: LinkedFiles, dataset: h5py.Dataset, what: str, named: tuple[str, str], known: Known) -> Array:
    """Resolve a source of a virtual dataset, given the names of its file and dataset."""
    file_name, name = (text.replace("%%", "\0") for text in named)
    if "%b" in file_name + name:
        fix = "make a virtual dataset that names each of its sources"
        raise UserError(f"{files.path}: {what} takes an endless series of sources, {' '.join(named)!r}", fix)
    file_name, name = file_name.replace("\0", "%"), name.replace("\0", "%")
    label = f"{name!r} of {file_name} (a source of {what})"
    owner = dataset.file
    if file_name != ".":
        owner = files.open(files.locate(owner, file_name, f"a source of {what}"))
    found = files.find(owner["/"], name)
    if not isinstance(found, h5py.Dataset):
        raise UserError(f"{files.path}: {label} does not exist", "copy or make that file again")
    if (meaning := meaning_of(found)) != meaning_of(dataset):
        fix = "copy the attributes of its sources to the virtual dataset"
        raise UserError(f"{files.path}: {label} has {meaning}, missing values {meaning.missing}, {what} has not", fix)
    return resolve(files, found, label, known)


def fit(
    label: str, target: Box, shape: tuple[int, ...], source: Box, array: Array, dtype: np.dtype[Any]
) -> FileSegment:
    """A piece of a virtual array; raises UserError if bounds, shape or dtype do not match its source."""
    if beyond(target, shape) or beyond(source, array.shape):
        raise UserError(f"{label} more than it has: its shape is {list(array.shape)}", "make that file again")
    if [len(one) for one in target if len(one) != 1] != [len(one) for one in source if len(one) != 1]:
        raise UserError(f"{label} values in another shape than its own", "make the virtual dataset again")
    if not np.can_cast(array.dtype, dtype, "safe") and {array.dtype.kind, dtype.kind} != {"f"}:
        raise UserError(f"{label} values of {array.dtype} as {dtype}", "give both the same dtype")
    return FileSegment(target, source, array)


def check_cover(label: str, shape: tuple[int, ...], pieces: Sequence[FileSegment]) -> None:
    """Raise UserError if, by their counts, pieces overlap or samples have no piece."""
    if sum(math.prod(map(len, piece.target)) for piece in pieces) > math.prod(shape):
        raise UserError(f"{label} has several sources for some samples", "make the virtual dataset again")
    if sum(len(piece.target[0]) for piece in pieces) < shape[0]:
        raise UserError(f"{label} has no source for some of its {shape[0]} samples", "make the virtual dataset again")

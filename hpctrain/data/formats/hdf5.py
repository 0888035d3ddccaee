"""HDF5 files as datasets: contiguous arrays through a memory map, all others by aligned blocks.

h5py reads under one global lock, and a call costs as much as copying dozens of small samples. A contiguous array needs
neither: the library only says where it begins.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Field, Samples, check_field, check_lengths, choose, content_fingerprint
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.errors import UserError

BLOCK_BYTES = 64 * 2**10
"""Smallest read from an array that is not contiguous."""


class Reader(Protocol):
    """One array of a file."""

    layout: str
    """How it is stored, for people."""

    def take(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """New array of the samples at these indices."""


class MappedArray:
    """A contiguous array, mapped into memory."""

    layout = "contiguous"

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.native = array.dtype.newbyteorder("=")

    def take(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """See Reader."""
        return self.array.take(indices, axis=0).astype(self.native, copy=False)


class BlockArray:
    """An array that only the HDF5 library can read: chunked, compressed, virtual. Whole aligned blocks are kept."""

    def __init__(self, stored: h5py.Dataset, field: Field, block_samples: int, cache: BlockCache) -> None:
        self.stored = stored
        self.field = field
        self.block_samples = block_samples
        self.cache = cache
        self.key = (stored.file.filename, stored.name)
        self.layout = layout(stored)

    def take(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """See Reader."""
        out = np.empty((len(indices), *self.field.shape), self.field.dtype)
        blocks = indices // self.block_samples
        by_block = np.argsort(blocks, kind="stable")
        for rows in np.split(by_block, np.flatnonzero(np.diff(blocks[by_block])) + 1):
            if len(rows):
                block = int(blocks[rows[0]])
                out[rows] = self._block(block)[indices[rows] - block * self.block_samples]
        return out

    def _block(self, block: int) -> NDArray[Any]:
        begin = block * self.block_samples
        return self.cache.get((*self.key, block), lambda: self._read(begin, begin + self.block_samples))

    def _read(self, begin: int, end: int) -> NDArray[Any]:
        try:
            values: NDArray[Any] = self.stored[begin:end]
        except OSError as error:
            raise UserError(
                f"{self.key[0]}: samples {begin} to {end - 1} of {self.stored.name!r} cannot be read: {error}",
                "the file is damaged: make or copy it again",
            ) from error
        return values.astype(self.field.dtype, copy=False)


class Hdf5Dataset:
    """The arrays of one file. Use ``open_hdf5``, which checks it."""

    def __init__(
        self, path: Path, fields: Mapping[str, Field], length: int, readers: Mapping[str, Reader], cache: BlockCache
    ):
        self.path = path
        self.fields = fields
        self.length = length
        self.readers = readers
        self.cache = cache

    def __len__(self) -> int:
        return self.length

    def read(self, indices: NDArray[np.int64]) -> Samples:
        """See Dataset."""
        return {name: reader.take(indices) for name, reader in self.readers.items()}

    def fingerprint(self) -> str:
        """See Dataset."""
        return content_fingerprint(self)


def open_hdf5(path: Path, names: tuple[str, ...] | None, cache: BlockCache) -> Hdf5Dataset:
    """The named arrays of a file, by default all of them.

    Raises:
        UserError: no such file, not HDF5, truncated, an array missing, not numbers, of another length, or empty.
    """
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open_file(path))
        present = dict(arrays_in(file))
        wanted = {name: present[name] for name in choose(list(present), names, str(path))}
        fields = {name: check_field(name, item.shape or (), item.dtype, str(path)) for name, item in wanted.items()}
        length = check_lengths({name: item.shape[0] for name, item in wanted.items()}, str(path))
        mapping = map_file(path)
        readers = {name: open_array(path, item, fields[name], mapping, cache) for name, item in wanted.items()}
        if not all(isinstance(reader, MappedArray) for reader in readers.values()):
            opened.pop_all()  # the library goes on reading it
    return Hdf5Dataset(path, fields, length, readers, cache)


def open_array(path: Path, stored: h5py.Dataset, field: Field, mapping: mmap.mmap, cache: BlockCache) -> Reader:
    """The fastest reader for an array."""
    offset = contiguous_offset(stored)
    if offset is not None:
        return map_array(path, mapping, stored, offset)
    check_filters(path, stored)
    return BlockArray(stored, field, block_samples(stored, field), cache)


def open_file(path: Path) -> h5py.File:
    """Opens for reading; raises UserError saying why it cannot."""
    try:
        path.open("rb").close()  # says plainly what h5py hides: missing, a folder, not readable
        if h5py.is_hdf5(path):
            return open_unlocked(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist", "correct its path, as the compute nodes see it") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder", f"name its files with a pattern: {path}/*.h5") from error
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error}", remedy(error)) from error
    raise UserError(
        f"{path} is not an HDF5 file", "hpctrain data pack makes one of .npz, .npy, CSV, Parquet and images"
    )


def open_unlocked(path: Path) -> h5py.File:
    """Opens for reading also where the file system does not know locks; never while another process writes."""
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if "unable to lock file" not in str(error) or error.errno == errno.EAGAIN:
            raise
        return h5py.File(path, "r", locking=False)


def remedy(error: OSError) -> str:
    """What to do about a file that cannot be opened."""
    if error.errno == errno.EMFILE:
        return "raise the number of files that a process may open (ulimit -n 65536), or pack the data into fewer"
    if error.errno == errno.EACCES:
        return "ask its owner for permission to read it"
    if error.errno == errno.EAGAIN:
        return "another process is writing it: wait until that has ended"
    return "it is truncated or damaged: copy it, or make it, again"


def arrays_in(group: h5py.Group, prefix: str = "") -> Iterator[tuple[str, h5py.Dataset]]:
    """All arrays of this file, in the order in which they were created where it keeps that, else by name."""
    for name in group:
        link = group.get(name, getlink=True)
        item = None if isinstance(link, h5py.ExternalLink) else group.get(name)
        if isinstance(item, h5py.Dataset):
            yield prefix + name, item
        elif isinstance(item, h5py.Group) and isinstance(link, h5py.HardLink):
            yield from arrays_in(item, f"{prefix}{name}/")


def contiguous_offset(stored: h5py.Dataset) -> int | None:
    """Where the array's bytes begin in the file, or None where they do not lie there as NumPy would lay them."""
    contiguous = stored.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
    as_numpy = stored.id.get_type() == h5py.h5t.py_create(stored.dtype, logical=True)
    written = stored.id.get_storage_size() == stored.size * stored.dtype.itemsize
    if not contiguous or not as_numpy or not written or stored.external:
        return None
    offset: int | None = stored.id.get_offset()
    return offset


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def map_array(path: Path, mapping: mmap.mmap, stored: h5py.Dataset, offset: int) -> MappedArray:
    """The array at this offset of the map."""
    if offset + stored.size * stored.dtype.itemsize > len(mapping):
        raise UserError(f"{path} is truncated: {stored.name!r} reaches beyond its end", "copy or make it again")
    flat = np.frombuffer(mapping, stored.dtype, stored.size, offset)
    return MappedArray(flat.reshape(stored.shape))


def check_filters(path: Path, stored: h5py.Dataset) -> None:
    """Raises UserError where the array is compressed in a way that this HDF5 library does not know."""
    plist = stored.id.get_create_plist()
    for index in range(plist.get_nfilters()):
        code, _, _, name = plist.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            raise UserError(
                f"{path}: {stored.name!r} is compressed with {name.decode() or code}, which this HDF5 library lacks",
                "pip install hdf5plugin and import it in the task, or store the data uncompressed",
            )


def block_samples(stored: h5py.Dataset, field: Field) -> int:
    """Samples of a block: whole chunks, of at least BLOCK_BYTES together."""
    rows = stored.chunks[0] if stored.chunks else 1
    return int(rows * math.ceil(BLOCK_BYTES / max(1, rows * field.num_bytes)))


def layout(stored: h5py.Dataset) -> str:
    """How an array that is not contiguous is stored."""
    if not stored.chunks:
        return "virtual" if stored.is_virtual else "not mappable"
    chunks = f"chunks of {' x '.join(map(str, stored.chunks))}"
    return f"{chunks}, {stored.compression}" if stored.compression else chunks

"""HDF5 files as datasets: contiguous arrays are memory-mapped, all others are read in aligned blocks.

h5py holds a global lock while it reads, and a call costs as much as copying dozens of small samples. For a contiguous
array, the library is only asked for the offset.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Field, Samples, check_field, check_lengths, choose, content_fingerprint
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.hdf5_arrays import Array, MappedArray
from hpctrain.data.formats.hdf5_files import LinkedFiles, asking, names_in
from hpctrain.data.formats.hdf5_resolve import Known, resolve
from hpctrain.data.formats.netcdf import NetcdfReader, meaning_of, meant
from hpctrain.data.formats.stored_hdf5 import StoredArray, files_of
from hpctrain.data.formats.tables import listed_fingerprint
from hpctrain.data.samples import grouped
from hpctrain.errors import UserError

BLOCK_BYTES = 64 * 2**10
"""Minimum size of a read from an array that is not contiguous."""


@dataclass(eq=False)
class BlockArray:
    """An array that is slow to read by sample (chunked, compressed, virtual): reads and caches aligned blocks."""

    path: Path | str
    name: str
    array: Array
    field: Field
    cache: BlockCache

    @property
    def layout(self) -> str:
        """Storage layout, for display."""
        return self.array.layout

    @cached_property
    def block_samples(self) -> int:
        """Samples per block: a multiple of the chunk's, with at least BLOCK_BYTES in total."""
        chunk = self.array.chunk_samples
        return chunk * math.ceil(BLOCK_BYTES / max(1, chunk * self.field.num_bytes))

    def take(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        out = np.empty((len(indices), *self.field.shape), self.field.dtype)
        for block, rows in grouped(indices // self.block_samples):
            out[rows] = self._block(block)[indices[rows] - block * self.block_samples]
        return out

    def _block(self, block: int) -> NDArray[Any]:
        return self.cache.get((self.path, self.name, block), lambda: self._read(block * self.block_samples))

    def _read(self, begin: int) -> NDArray[Any]:
        rows = range(begin, min(begin + self.block_samples, self.array.shape[0]))
        try:
            values = self.array.read((rows, *map(range, self.field.shape)))
        except OSError as error:
            what = f"{self.path}: samples {begin} to {rows[-1]} of {'/' + self.name!r} cannot be read: {error}"
            raise UserError(what, "the file is damaged: make or copy it again") from error
        return values.astype(self.field.dtype, copy=False)


@dataclass(frozen=True, eq=False)
class Hdf5Dataset:
    """The arrays of one HDF5 file. Create it with ``open_hdf5``, which checks the file."""

    path: Path | str
    fields: Mapping[str, Field]
    length: int
    readers: Mapping[str, NetcdfReader]
    cache: BlockCache
    outside: tuple[str, ...]
    origin: Mapping[str, Any] | None
    decode: str | None
    """``netcdf`` or None; see ``open_dataset``."""
    ordered: bool
    """Whether the user gave the order of the arrays, or the file records it, so that it says more than the alphabet."""

    def __len__(self) -> int:
        return self.length

    def read(self, indices: NDArray[np.int64]) -> Samples:
        try:
            return {name: reader.take(indices) for name, reader in self.readers.items()}
        except MemoryError as error:
            sample_bytes = sum(field.num_bytes for field in self.fields.values())
            what = f"{self.path}: {len(indices)} samples of {sample_bytes / 1e6:g} MB do not fit into memory"
            raise UserError(what, "use smaller batches, or store smaller samples") from error

    def fingerprint(self) -> str:
        if self.origin is not None:
            return listed_fingerprint(self, str(self.path), self.origin)
        return content_fingerprint(self)


def open_hdf5(
    path: Path | str,
    names: tuple[str, ...] | None,
    cache: BlockCache,
    outside: Sequence[str | Path] = (),
    decode: str | None = None,
) -> Hdf5Dataset:
    """Open the named arrays of a file, by default all of them.

    Args:
        path: the file, or its URL in an object store.
        names: names of the arrays.
        cache: for blocks of arrays that are not mapped.
        outside: further folders to which links, virtual sources and external storage may lead.
        decode: ``netcdf`` or None; see ``open_dataset``.

    Raises:
        UserError: the file is missing, not HDF5 or truncated; an array is missing, not numeric, empty or of a different
            length; or the file leads to one that is missing or in a folder that is not allowed.
    """
    where = str(path)
    with asking(path), files_of(path, cache, outside) as files:
        known: Known = {}
        datasets = chosen(files, names, where)
        arrays = {name: resolve(files, dataset, repr(name), known) for name, dataset in datasets.items()}
        meanings = {name: meaning_of(dataset) for name, dataset in datasets.items()}
        fields = {name: check_field(name, array.shape, array.dtype, where) for name, array in arrays.items()}
        length = check_lengths({name: array.shape[0] for name, array in arrays.items()}, where)
        ordered = names is not None or keeps_order(files.root(), list(arrays))
    readers: dict[str, NetcdfReader] = {}
    for name, array in arrays.items():
        blocks = BlockArray(path, name, array, fields[name], cache)
        reader: NetcdfReader = array if isinstance(array, (MappedArray, StoredArray)) else blocks
        readers[name] = meant(reader, meanings[name], decode is not None, f"{where}: {name!r}")
    if decode:
        for name, field in fields.items():
            fields[name] = Field(field.shape, meanings[name].decoded(np.zeros(1, field.dtype)).dtype)
    dataset = Hdf5Dataset(path, fields, length, readers, cache, tuple(map(str, outside)), files.origin, decode, ordered)
    if files.origin is not None:  # also at process exit, after which the library must not call into Python
        for file in files.opened.values():
            weakref.finalize(dataset, file.close)
    return dataset


def chosen(files: LinkedFiles, names: tuple[str, ...] | None, where: str) -> dict[str, h5py.Dataset]:
    """The datasets of these names, following links; by default all, except those in groups behind links."""
    root = files.root()
    found = {name: files.find(root, name) for name in names or [name for name, _ in names_in(root)]}
    datasets = {name: item for name, item in found.items() if isinstance(item, h5py.Dataset)}
    if names is not None and len(datasets) < len(names):
        choose([name for name, _ in names_in(root)], names, where)
    return datasets


def keeps_order(root: h5py.File, names: Sequence[str]) -> bool:
    """Whether the groups of these arrays record the order in which the arrays were created."""
    groups = {"/", *(f"/{name.rpartition('/')[0]}" for name in names)}
    return all(root[group].id.get_create_plist().get_link_creation_order() for group in groups)

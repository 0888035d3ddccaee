"""HDF5 files as datasets: contiguous arrays are memory-mapped, all others are read in aligned blocks.

h5py holds a global lock while it reads, and a call costs as much as copying dozens of small samples. For a contiguous
array, the library is only asked for the offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpctrain.data.dataset import Field, Samples, check_field, check_lengths, choose, content_fingerprint
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.formats.hdf5_arrays import BlockArray
from hpctrain.data.formats.hdf5_files import Hdf5File, asking, names_in
from hpctrain.data.formats.hdf5_resolve import resolve
from hpctrain.data.formats.netcdf import NetcdfReader, meaning_of, meant
from hpctrain.errors import UserError
from hpctrain.system.array_types import Ints


@dataclass(frozen=True, eq=False)
class Hdf5Dataset:
    """The arrays of one HDF5 file. Create it with ``open_hdf5``, which checks the file."""

    path: Path
    fields: Mapping[str, Field]
    length: int
    readers: Mapping[str, NetcdfReader]
    cache: BlockCache
    decode: str | None
    """``netcdf`` or None; see ``open_dataset``."""
    ordered: bool
    """Whether the user gave the order of the arrays, or the file records it, so that it says more than the alphabet."""

    def __len__(self) -> int:
        return self.length

    def read(self, indices: Ints) -> Samples:
        try:
            return {name: reader.take(indices) for name, reader in self.readers.items()}
        except MemoryError as error:
            sample_bytes = sum(field.num_bytes for field in self.fields.values())
            what = f"{self.path}: {len(indices)} samples of {sample_bytes / 1e6:g} MB do not fit into memory"
            raise UserError(what, "use smaller batches, or store smaller samples") from error

    def fingerprint(self) -> str:
        return content_fingerprint(self)


def open_hdf5(
    path: Path,
    names: tuple[str, ...] | None,
    cache: BlockCache,
    decode: str | None = None,
) -> Hdf5Dataset:
    """Open the named arrays of a file, by default all of them.

    Args:
        path: the file.
        names: names of the arrays.
        cache: for blocks of arrays that are not mapped.
        decode: ``netcdf`` or None; see ``open_dataset``.

    Raises:
        UserError: the file is missing, not HDF5 or truncated; or an array is missing, not numeric, empty,
            of a different length, or in another file.
    """
    where = str(path)
    with asking(path), Hdf5File(path) as file:
        datasets = chosen(file, names, where)
        mapped = {name: resolve(file, dataset, repr(name)) for name, dataset in datasets.items()}
        meanings = {name: meaning_of(dataset) for name, dataset in datasets.items()}
        fields = {name: check_field(name, each.shape or (), each.dtype, where) for name, each in datasets.items()}
        length = check_lengths({name: dataset.shape[0] for name, dataset in datasets.items()}, where)
        ordered = names is not None or keeps_order(file.root, list(datasets))
    readers: dict[str, NetcdfReader] = {}
    for name, dataset in datasets.items():
        reader = mapped[name] or BlockArray(path, name, dataset, fields[name], cache)
        readers[name] = meant(reader, meanings[name], decode is not None, f"{where}: {name!r}")
    if decode:
        for name, field in fields.items():
            fields[name] = Field(field.shape, meanings[name].decoded(np.zeros(1, field.dtype)).dtype)
    return Hdf5Dataset(path, fields, length, readers, cache, decode, ordered)


def chosen(file: Hdf5File, names: tuple[str, ...] | None, where: str) -> dict[str, h5py.Dataset]:
    """The datasets of these names, following soft links; by default all, except those in groups behind links."""
    found = {name: file.find(name) for name in names or names_in(file.root)}
    datasets = {name: item for name, item in found.items() if isinstance(item, h5py.Dataset)}
    if names is not None and len(datasets) < len(names):
        choose(list(names_in(file.root)), names, where)
    return datasets


def keeps_order(root: h5py.File, names: Sequence[str]) -> bool:
    """Whether the groups of these arrays record the order in which the arrays were created."""
    groups = {"/", *(f"/{name.rpartition('/')[0]}" for name in names)}
    return all(root[group].id.get_create_plist().get_link_creation_order() for group in groups)

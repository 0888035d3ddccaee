"""Opens the paths that a user names as one source to pack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpctrain.config.values import refuse_credentials
from hpctrain.data.formats.hdf5_files import look_at
from hpctrain.data.formats.tables import open_table
from hpctrain.data.packing.pack_source import Columns, PackSource, from_dataset, join, only_names
from hpctrain.data.packing.text import SUFFIXES
from hpctrain.errors import UserError

KINDS = {
    ".npz": "npz",
    ".npy": "npy",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".orc": "orc",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".nc": "netcdf",
    **dict.fromkeys(SUFFIXES, "text"),
}
"""Kind by file suffix; a folder holds images. JSON lines are text unless the kind is given as ``json``."""
TABLES = ("csv", "parquet", "json", "orc")
"""Kinds that Arrow reads: files and folders of files, also in object stores."""


def open_source(
    sources: Sequence[str],
    kind: str | None = None,
    columns: Columns | None = None,
    size: tuple[int, int] | None = None,
) -> PackSource:
    """The samples of the files, concatenated; each .npy file provides one array instead.

    Args:
        sources: files of one kind, folders or URIs of tables, or one folder of images.
        kind: one of ``NAMES``, by default derived from the suffixes; for text use ``text_source``.
        columns: for tables, the columns of each array; for archives, the arrays to use.
        size: (height, width) to which images are scaled.

    Raises:
        UserError: a file is missing, of unknown kind, damaged, or does not match the others.
    """
    kind = kind_of(sources, kind)
    if columns and kind in ("images", "npy"):
        raise UserError(f"arrays are chosen for {kind}", "leave out --field: it is for tables and archives")
    if size and kind != "images":
        raise UserError(f"a size is given for {kind}", "leave out --size: it is for images")
    paths = [Path(source) for source in sources if "://" not in source]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist", "correct its path")
        if not path.is_dir():
            look_at(path)
    if kind in TABLES:
        from hpctrain.data.packing.table import from_table

        return join([from_table(open_table(each, kind), columns) for each in sources], sources)
    if kind == "images":
        from hpctrain.data.packing.images import from_images

        if len(paths) > 1 or not paths[0].is_dir():
            raise UserError("images are packed from one folder at a time", "name one folder that holds them")
        return from_images(paths[0], size)
    if kind == "npy":
        from hpctrain.data.packing.arrays import from_npy

        return from_npy(paths)
    return join([open_file(source, kind, columns) for source in sources], sources)


def open_file(path: str, kind: str, columns: Columns | None) -> PackSource:
    """The source of a single .npz or HDF5 file, for kinds whose files are concatenated."""
    if kind == "npz":
        from hpctrain.data.packing.arrays import from_npz

        return from_npz(Path(path), only_names(columns, kind))
    from hpctrain.data.formats.sources import open_dataset

    return from_dataset(open_dataset(path, only_names(columns, kind), decode=decode_for(kind)))


def decode_for(kind: str | None) -> Literal["netcdf"] | None:
    """The argument ``decode`` of ``open_dataset`` for files of this kind."""
    return "netcdf" if kind == "netcdf" else None


def kind_of(sources: Sequence[str], kind: str | None = None) -> str:
    """The given kind, or the one of all suffixes. Raises UserError if they are unknown or of different kinds."""
    for source in sources:
        refuse_credentials(source, "the address of the data")
    if kind is not None:
        return kind
    kinds = {"images" if Path(source).is_dir() else KINDS.get(Path(source).suffix.lower()) for source in sources}
    if len(kinds) > 1:
        raise UserError("the files to pack are of several kinds", "pack each kind by itself")
    found = kinds.pop()
    if found is None:
        raise UserError(f"{sources[0]} has an unknown suffix", f"say what it is: --kind {', '.join(NAMES)}")
    return found


NAMES = (*dict.fromkeys((*KINDS.values(), *TABLES)), "images")
"""Names of all kinds."""

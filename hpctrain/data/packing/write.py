"""Writes a source to an HDF5 file, atomically."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.data.casting import fit
from hpctrain.data.dataset import Field, Samples
from hpctrain.data.packing.pack_source import NOTES, PackSource
from hpctrain.errors import UserError, file_errors
from hpctrain.system.files import replacement

PAGE = 4096
CHUNK_BYTES = 2**20
"""Default chunk size."""


def write_hdf5(
    path: str | Path,
    source: PackSource,
    dtypes: Mapping[str, np.dtype[Any]] | None = None,
    chunk_samples: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda samples: None,
) -> None:
    """Write all samples to a temporary file next to ``path``, which is synced and renamed at the end.

    Args:
        path: the file to create.
        source: the samples to write.
        dtypes: dtypes by field, where they differ from the source's; values must fit.
        chunk_samples: store chunks of this many samples; by default arrays are contiguous, which is fastest to read.
        compression: gzip or lzf; implies chunks.
        overwrite: replace an existing file.
        on_progress: called with the number of samples written since the last call.

    Raises:
        UserError: the file exists, the disk has too little space, or a value does not fit its dtype.
    """
    path = Path(path)
    fields = {name: Field(field.shape, (dtypes or {}).get(name, field.dtype)) for name, field in source.fields.items()}
    check_names(fields)
    prepare(path, overwrite)
    with making(path):
        if compression is None:
            check_space(path.parent, source.length * sum(field.num_bytes for field in fields.values()))
        with replacement(path) as temporary, DeferringFile(temporary, "w+b") as raw:
            if compression is None and chunk_samples is None:
                write_contiguous(raw, source, fields, on_progress)
            else:
                write_chunked(raw, source, fields, chunk_samples, compression, on_progress)
            raw.check()


def prepare(path: Path, overwrite: bool) -> None:
    """Create the file's folder. Raises UserError if the file exists and ``overwrite`` is false."""
    with making(path):
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists", "choose another name, or replace it with --force")
        path.parent.mkdir(parents=True, exist_ok=True)


def making(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn file-system errors in the body into UserErrors."""
    return file_errors(f"{path} cannot be written", "make room, or write elsewhere")


def write_contiguous(
    raw: DeferringFile, source: PackSource, fields: Mapping[str, Field], on_progress: Callable[[int], None]
) -> None:
    """Write contiguous arrays.

    HDF5 creates and closes the file, then samples are written to it directly, so a full disk raises a plain OSError.
    """
    with new_file(raw, source) as file:
        offsets = allocate(file, fields, source.length)
    for begin, block in checked_blocks(source, fields):
        for name, values in block.items():
            raw.seek(offsets[name] + begin * fields[name].num_bytes)
            raw.write(values.reshape(-1).view(np.uint8))
        raw.check()
        on_progress(len(values))


def allocate(file: h5py.File, fields: Mapping[str, Field], length: int) -> dict[str, int]:
    """Create contiguous arrays of ``length`` rows, with their space, which is not filled; returns their offsets."""
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    arrays = {
        name: file.create_dataset(name, (length, *field.shape), field.dtype, dcpl=early)
        for name, field in fields.items()
    }
    return {name: array.id.get_offset() or 0 for name, array in arrays.items()}


def write_chunked(
    raw: DeferringFile,
    source: PackSource,
    fields: Mapping[str, Field],
    chunk_samples: int | None,
    compression: str | None,
    on_progress: Callable[[int], None],
) -> None:
    """Write chunks of whole samples. The chunk cache holds incomplete chunks, so each is compressed once."""
    with new_file(raw, source) as file:
        for name, field in fields.items():
            rows = min(source.length, chunk_samples or max(1, CHUNK_BYTES // max(1, field.num_bytes)))
            file.create_dataset(
                name,
                (source.length, *field.shape),
                field.dtype,
                chunks=(rows, *field.shape),
                compression=compression,
                shuffle=compression is not None,
                rdcc_nbytes=2 * rows * field.num_bytes,
            )
        for begin, block in checked_blocks(source, fields):
            for name, values in block.items():
                file[name][begin : begin + len(values)] = values
            raw.check()
            on_progress(len(values))


def new_file(raw: io.FileIO, source: PackSource) -> h5py.File:
    """Create an HDF5 file with the source's notes that aligns datasets to pages and stores no timestamps.

    It keeps the order of the arrays if the source has one."""
    order = h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_link_creation_order(order if source.ordered else 0)
    creation.set_attr_creation_order(order)
    creation.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, raw)
    access.set_alignment(PAGE, PAGE)
    file = h5py.File(h5py.h5f.create(b"packed", h5py.h5f.ACC_TRUNC, creation, access))
    file.attrs[NOTES] = json.dumps(source.notes)
    return file


class DeferringFile(io.FileIO):
    """A file that keeps its first OSError for ``check`` instead of raising it: libhdf5 crashes when it closes a file
    after a failed write."""

    failure: OSError | None = None

    def write(self, content: Any) -> int:
        rest = memoryview(content).cast("B")
        num_bytes = len(rest)
        with self._deferring():
            while len(rest):
                rest = rest[super().write(rest) :]
        return num_bytes

    def truncate(self, size: int | None = None) -> int:
        with self._deferring():
            super().truncate(size)
        return self.tell() if size is None else size

    @contextlib.contextmanager
    def _deferring(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error

    def check(self) -> None:
        """Raise the first failure, if there was one."""
        if self.failure:
            raise self.failure


def checked_blocks(source: PackSource, fields: Mapping[str, Field]) -> Iterator[tuple[int, Samples]]:
    """The source's blocks, cast to the dtypes to write, each with the index of its first sample.

    Raises:
        UserError: a block differs in shape, a value does not fit, or the number of samples is wrong.
    """
    begin = 0
    for block in source.blocks():
        for name, field in fields.items():
            if block[name].shape[1:] != field.shape:
                what = f"{name!r} has shape {block[name].shape[1:]} from sample {begin} on, and {field.shape} before it"
                raise UserError(what, "pad all samples to one shape")
        made = {name: fit(name, block[name], field.dtype, begin) for name, field in fields.items()}
        end = begin + len(next(iter(made.values())))
        if end <= source.length:
            yield begin, made
        begin = end
    if begin != source.length:
        fix = "do not change it while it is packed"
        raise UserError(f"the source gave {begin} samples in place of {source.length}", fix)


def check_names(names: Collection[str]) -> None:
    """Raise UserError if HDF5 cannot store arrays under these names; slashes create groups."""
    for name in names:
        is_group = any(other.startswith(f"{name}/") for other in names)
        if is_group or "\0" in name or any(part in ("", ".") for part in name.split("/")):
            what = f"an array in HDF5 cannot be named {name!r}" + (" and be a group, too" if is_group and name else "")
            raise UserError(what, "rename the column or array, or choose others with --field")


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise UserError early if the disk has too little free space."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        fix = "make room, write elsewhere, choose a narrower --dtype, or use --compression gzip"
        raise UserError(f"{folder} has {free / 1e9:.2f} GB free and the file needs {num_bytes / 1e9:.2f} GB", fix)

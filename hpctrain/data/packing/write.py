"""Writes a source into an HDF5 file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Field, Samples
from hpctrain.data.packing.growing_file import ALONE, PATIENCE_S, Ranks, growing
from hpctrain.data.packing.source import NOTES, Piece, Source
from hpctrain.errors import UserError, file_errors
from hpctrain.system.files import replacement

PAGE = 4096
CHUNK_BYTES = 2**20
"""Size of a chunk if it is not given."""


def write_hdf5(
    path: str | Path,
    source: Source,
    dtypes: Mapping[str, np.dtype[Any]] | None = None,
    chunk_samples: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda samples: None,
    ranks: Ranks = ALONE,
) -> None:
    """Writes all samples, to a temporary file next to ``path`` that is synced and renamed at the end.

    Contiguous arrays of tables are written by all ranks, and what a killed call has written the next one does not write
    again, if the tables and all that is asked are the same.

    Args:
        path: the file to make.
        source: what goes in.
        dtypes: by field, if they should differ from the source's; values must fit.
        chunk_samples: store chunks of this many samples; by default arrays are contiguous, which reads fastest.
        compression: gzip or lzf, in chunks.
        overwrite: replace a file that is there.
        on_progress: called with the number of samples that were written since.
        ranks: that make the same call, for a file on a disk that they share; a ``Group``.

    Raises:
        UserError: the file exists, does not fit, or a value does not fit its dtype.
    """
    path = Path(path)
    fields = {name: Field(field.shape, (dtypes or {}).get(name, field.dtype)) for name, field in source.fields.items()}
    check_names(fields)
    prepare(path, overwrite)
    ranks.allgather(None, "look for the file", PATIENCE_S)  # before one of them makes it
    with making(path):
        if source.pieces and compression is None and chunk_samples is None:
            write_pieces(path, source, fields, on_progress, ranks)
        elif ranks.rank == 0:
            if compression is None:
                check_space(path.parent, source.length * sum(field.num_bytes for field in fields.values()))
            with replacement(path) as temporary:
                if compression is None and chunk_samples is None:
                    # HDF5 lays the file out and closes it, then the bytes go to their places: a full disk is a plain
                    # error.
                    with PatientFile(temporary, "w+b") as raw:
                        write_samples(raw, source, 0, fields, lay_out(raw, source, fields), on_progress)
                else:
                    write_chunked(temporary, source, fields, chunk_samples, compression, on_progress)
    ranks.allgather(None, "write the file", PATIENCE_S)


def prepare(path: Path, overwrite: bool) -> None:
    """Makes the folder that a file is to lie in. Raises UserError if the file is there, and is not to be replaced."""
    with making(path):
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists", "choose another name, or replace it with --force")
        path.parent.mkdir(parents=True, exist_ok=True)


def making(path: Path) -> contextlib.AbstractContextManager[None]:
    """Raises UserError for errors of the file system."""
    return file_errors(f"{path} cannot be written", "make room, or write elsewhere")


def lay_out(raw: PatientFile, source: Source, fields: Mapping[str, Field]) -> dict[str, int]:
    """Makes the file without its samples; where each array begins."""
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with new_file(raw) as file:
        file.attrs[NOTES] = json.dumps(source.notes)
        return {
            name: file.create_dataset(name, (source.length, *field.shape), field.dtype, dcpl=early).id.get_offset()
            for name, field in fields.items()
        }


def write_samples(
    raw: PatientFile,
    source: Source | Piece,
    begin: int,
    fields: Mapping[str, Field],
    offsets: Mapping[str, int],
    on_progress: Callable[[int], None],
) -> None:
    """Those of a source from sample ``begin`` of the file on."""
    for row, block in checked_blocks(source, fields, begin):
        for name, values in block.items():
            raw.seek(offsets[name] + row * fields[name].num_bytes)
            raw.write(values.reshape(-1).view(np.uint8))
        raw.check()
        on_progress(len(values))


def write_pieces(
    path: Path, source: Source, fields: Mapping[str, Field], on_progress: Callable[[int], None], ranks: Ranks
) -> None:
    """Writes what an earlier call has not; each rank some of it."""
    told = [{name: [field.shape, field.dtype.str] for name, field in fields.items()}, source.notes]
    identity = json.dumps([*told, [[piece.key, piece.length] for piece in source.pieces]])
    begins = [0, *accumulate(piece.length for piece in source.pieces)]

    def make(temporary: Path) -> dict[str, int]:
        check_space(path.parent, source.length * sum(field.num_bytes for field in fields.values()))
        with PatientFile(temporary, "w+b") as raw:
            offsets = lay_out(raw, source, fields)
            raw.check()
        return offsets

    with growing(path, identity, len(source.pieces), make, ranks) as file, for_pieces(file.path) as raw:
        on_progress(sum(source.pieces[index].length for index in file.done))
        for index in file.mine:
            write_samples(raw, source.pieces[index], begins[index], fields, file.layout, on_progress)
            file.finish(index)


def for_pieces(path: Path) -> PatientFile:
    """A file that is there, to write only: NFS would read pages that ranks share, and write them back whole."""
    return PatientFile(path, "wb", opener=lambda name, flags: os.open(name, flags & ~(os.O_TRUNC | os.O_CREAT)))


def write_chunked(
    temporary: Path,
    source: Source,
    fields: Mapping[str, Field],
    chunk_samples: int | None,
    compression: str | None,
    on_progress: Callable[[int], None],
) -> None:
    """Chunks of whole samples; what reaches a chunk's end waits for the chunk, which is compressed once."""
    with PatientFile(temporary, "w+b") as raw:
        with new_file(raw) as file:
            file.attrs[NOTES] = json.dumps(source.notes)
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
            for begin, block in checked_blocks(source, fields, 0):
                for name, values in block.items():
                    file[name][begin : begin + len(values)] = values
                raw.check()
                on_progress(len(values))
        raw.check()


def new_file(raw: io.FileIO) -> h5py.File:
    """An empty HDF5 file that keeps its datasets' order, aligns them to pages, and does not hold the time of day."""
    order = h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_link_creation_order(order)
    creation.set_attr_creation_order(order)
    creation.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, raw)
    access.set_alignment(PAGE, PAGE)
    return h5py.File(h5py.h5f.create(b"packed", h5py.h5f.ACC_TRUNC, creation, access))


class PatientFile(io.FileIO):
    """Keeps its first failure for later and fails no more: libhdf5 crashes on closing what it could not write."""

    failure: OSError | None = None

    def write(self, content: Any) -> int:
        rest = memoryview(content).cast("B")
        num_bytes = len(rest)
        with self._patience():
            while len(rest):
                rest = rest[super().write(rest) :]
        return num_bytes

    def truncate(self, size: int | None = None) -> int:
        with self._patience():
            super().truncate(size)
        return self.tell() if size is None else size

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error

    def check(self) -> None:
        """Raises the failure, if there was one."""
        if self.failure:
            raise self.failure


def checked_blocks(source: Source | Piece, fields: Mapping[str, Field], begin: int) -> Iterator[tuple[int, Samples]]:
    """The source's blocks in the dtypes to write, each with the index of its first sample, from ``begin`` on."""
    first = begin
    for block in source.blocks():
        for name, field in fields.items():
            if block[name].shape[1:] != field.shape:
                raise UserError(
                    f"{name!r} has shape {block[name].shape[1:]} from sample {begin} on, and {field.shape} before it",
                    "pad all samples to one shape",
                )
        made = {name: fit(name, block[name], field.dtype, begin) for name, field in fields.items()}
        end = begin + len(next(iter(made.values())))
        if end > first + source.length:
            break
        yield begin, made
        begin = end
    else:
        end = begin
    if end != first + source.length:
        raise UserError(
            f"the source gave {end - first} samples in place of {source.length}", "do not change it while it is packed"
        )


def fit(name: str, values: NDArray[Any], dtype: np.dtype[Any], begin: int) -> NDArray[Any]:
    """The values in this dtype, C-contiguous; floats are rounded, but nothing may overflow or lose its fraction."""
    if values.dtype == dtype:
        return np.ascontiguousarray(values)
    loses_imaginary = values.dtype.kind == "c" and dtype.kind != "c"
    kept = values.real if loses_imaginary else values
    with np.errstate(all="ignore"):
        cast = np.ascontiguousarray(kept.astype(dtype))
        wrong = cast != kept if dtype.kind in "biu" else np.isfinite(kept) & ~np.isfinite(cast)
    if loses_imaginary:
        wrong = wrong | (values.imag != 0)
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        value = values[row][wrong[row]].ravel()[0] if values.ndim > 1 else values[row]
        raise UserError(
            f"{name!r} of sample {begin + row} holds {value}, which {dtype} cannot hold", "choose a wider dtype"
        )
    return cast


def check_names(names: Collection[str]) -> None:
    """Raises UserError if HDF5 has no array of such a name; slashes make groups."""
    for name in names:
        is_group = any(other.startswith(f"{name}/") for other in names)
        if is_group or "\0" in name or any(part in ("", ".") for part in name.split("/")):
            raise UserError(
                f"an array in HDF5 cannot be named {name!r}" + (" and be a group, too" if is_group and name else ""),
                "rename the column or array, or choose others with --field",
            )


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises UserError if this much is not free, before time is spent."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB free and the file needs {num_bytes / 1e9:.2f} GB",
            "make room, write elsewhere, choose a narrower --dtype, or use --compression gzip",
        )

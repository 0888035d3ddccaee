"""An HDF5 file whose rows several processes write, each its own: without parallel HDF5, and without waiting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpctrain.data.dataset import Field, Samples
from hpctrain.errors import RunFailed


def create_row_file(path: Path, fields: Mapping[str, Field], length: int) -> None:
    """Makes the file with all of its space: contiguous datasets of shape [length, *field.shape], not filled.

    Raises:
        RunFailed: there is one, no space, or the folder cannot be written.
    """
    try:
        with h5py.File(path, "x") as file:
            for name, field in fields.items():
                properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                properties.set_layout(h5py.h5d.CONTIGUOUS)
                properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                space = h5py.h5s.create_simple((length, *field.shape))
                kind = h5py.h5t.py_create(field.dtype, logical=True)
                h5py.h5d.create(file.id, name.encode(), kind, space, properties)
    except OSError as error:
        raise RunFailed(f"{path} cannot be made: {error}", "check that its folder exists and has free space") from error


@dataclass(frozen=True)
class RowWriter:
    """Writes rows into a file that ``create_row_file`` made."""

    path: Path
    offsets: Mapping[str, int]
    """Of each dataset's first byte in the file."""

    @classmethod
    def open(cls, path: Path) -> RowWriter:
        """Reads where the datasets lie."""
        with h5py.File(path, "r") as file:
            return cls(path, {name: file[name].id.get_offset() for name in file})

    def write(self, first_row: int, rows: Samples) -> None:
        """Writes consecutive rows of each dataset; arrays must have the dtypes that the file was made with.

        Raises:
            RunFailed: the disk is full, or the file is gone.
        """
        try:
            with open(self.path, "r+b", buffering=0) as file:
                for name, array in rows.items():
                    data = np.ascontiguousarray(array)
                    row_bytes = data.nbytes // max(len(data), 1)
                    content = data.reshape(-1).view(np.uint8).data
                    write_fully(file.fileno(), content, self.offsets[name] + first_row * row_bytes)
        except OSError as error:
            raise RunFailed(f"{self.path} cannot be written: {error.strerror}", "check the free space there") from error


def write_fully(handle: int, data: memoryview, offset: int) -> None:
    """``pwrite`` until everything is written: one call may take less."""
    while len(data):
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written

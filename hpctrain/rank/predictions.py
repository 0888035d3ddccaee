"""Writes the predictions of all ranks to one HDF5 file, in the order of the data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import h5py
import numpy as np

from hpctrain.comm.group import Group
from hpctrain.data.dataset import Field, Samples
from hpctrain.data.packing.write import allocate
from hpctrain.data.pipeline import ValidationData
from hpctrain.errors import RunFailed, UserError, file_errors
from hpctrain.system.files import sync
from hpctrain.train.evaluation import even_batches
from hpctrain.train.framework import Evaluator, Judged, samples_of


def write_predictions(framework: Judged, data: ValidationData, group: Group, path: Path, writes: bool = True) -> None:
    """Has each rank predict a contiguous part of the data and write its rows. Collective.

    The file appears under its name when it is complete. ``writes`` is False on ranks whose outputs another group
    writes, as with a partitioned model.

    Raises:
        UserError: the outputs are not one row of a fixed shape per sample, or the folder cannot be made.
        RunFailed: the ranks' outputs differ in shape or dtype, or the file cannot be written.
    """
    with framework.merged_buffers(group):
        write_outputs(framework, data, group, path, writes)


def write_outputs(framework: Evaluator, data: ValidationData, group: Group, path: Path, writes: bool) -> None:
    """See ``write_predictions``; with the model as it is."""
    outputs = (
        (framework.predict(batch), samples_of(batch) if is_own else 0)
        for batch, is_own in even_batches(data, framework.sync_group)
    )
    first = next(outputs, None)
    fields = agree_on_fields(first[0] if first else {}, group)
    if not writes:
        for rows, samples in outputs:
            if samples:
                check_rows(rows, samples, fields)
        return
    partial = path.with_name(f".{path.name}.partial")
    if group.rank == 0:
        make_folder(path)
        partial.unlink(missing_ok=True)  # left by a process that was killed, or a link
        create_row_file(partial, fields, len(data.dataset))
    group.barrier("make the file of predictions")
    writer = RowWriter.open(partial)
    row = data.part.start
    for rows, samples in chain([first] if first else [], outputs):
        if samples:
            check_rows(rows, samples, fields)
            writer.write(row, rows)
            row += samples
    sync(partial)
    group.barrier("write the predictions")
    if group.rank == 0:
        os.replace(partial, path)


def make_folder(path: Path) -> None:
    """Makes the folder of a file to be written. Raises UserError."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", "name a file with --output")
    with file_errors(f"{path.parent} cannot be made", "choose another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)


def check_rows(rows: Samples, samples: int, fields: Mapping[str, Field]) -> None:
    """Raises UserError if a batch's outputs do not have the shape and dtype of its rows in the file."""
    for name, field in fields.items():
        found, wanted = rows.get(name), (samples, *field.shape)
        if found is None or found.shape != wanted or found.dtype != field.dtype:
            given = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
            raise UserError(
                f"output {name!r} is {given} for a batch of {samples} samples, not {field.dtype}{list(wanted)}",
                "return arrays with one row for each sample, of the same shape and type in all batches",
            )


def agree_on_fields(head: Samples, group: Group) -> dict[str, Field]:
    """Returns the shape per sample and the dtype of each output; ranks without samples may have none. Collective.

    Raises:
        RunFailed: they differ between ranks.
    """
    mine = {name: [list(array.shape[1:]), array.dtype.str] for name, array in head.items()}
    described = [each for each in group.allgather(mine, "compare their outputs") if each]
    if any(each != described[0] for each in described):
        raise RunFailed(
            "the model's outputs differ in shape or dtype between ranks", "return arrays of a fixed shape per sample"
        )
    return {name: Field(tuple(shape), np.dtype(kind)) for name, (shape, kind) in described[0].items()}


def create_row_file(path: Path, fields: Mapping[str, Field], length: int) -> None:
    """Makes the file with all its space allocated: contiguous, unfilled datasets of shape [length, *field.shape].

    Raises:
        RunFailed: the file exists, the disk is full, or the folder cannot be written.
    """
    try:
        with h5py.File(path, "x") as file:
            allocate(file, fields, length)
    except OSError as error:
        raise RunFailed(f"{path} cannot be made: {error}", "check that its folder exists and has free space") from error


@dataclass(frozen=True)
class RowWriter:
    """Writes rows into a file that ``create_row_file`` made."""

    path: Path
    offsets: Mapping[str, int]
    """Offset of each dataset's first byte in the file."""

    @classmethod
    def open(cls, path: Path) -> RowWriter:
        """Opens such a file and reads the offsets of its datasets."""
        with h5py.File(path, "r") as file:
            return cls(path, {name: file[name].id.get_offset() for name in file})

    def write(self, first_row: int, rows: Samples) -> None:
        """Writes consecutive rows of each dataset; arrays must have the dtypes that the file was made with.

        Raises:
            RunFailed: the disk is full, or the file is gone.
        """
        try:
            with open(self.path, "r+b") as file:
                for name, array in rows.items():
                    data = np.ascontiguousarray(array)
                    file.seek(self.offsets[name] + first_row * (data.nbytes // max(len(data), 1)))
                    file.write(data.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise RunFailed(f"{self.path} cannot be written: {error.strerror}", "check the free space there") from error

"""Predictions of all ranks in one HDF5 file, in the order of the data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.data.dataset import Field, Samples
from hpctrain.data.formats.row_file import RowWriter, create_row_file
from hpctrain.data.pipeline import ValidationData
from hpctrain.errors import RunFailed, UserError, file_errors
from hpctrain.train.framework import Evaluator, samples_of
from hpctrain.train.uneven_batches import even_batches


def write_predictions(
    framework: Evaluator, data: ValidationData, group: Group, path: Path, writes: bool = True
) -> None:
    """Each rank predicts its contiguous part and writes it into its rows; the file appears when complete. Collective.

    ``writes`` is False for ranks whose outputs another group already writes, as with a partitioned model.

    Raises:
        UserError: outputs are not one row of a fixed shape for each sample, or the folder cannot be made.
        RunFailed: the ranks' outputs differ in shape or dtype, or the file cannot be written.
    """
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
        partial.unlink(missing_ok=True)  # left by one that was killed, or a link
        create_row_file(partial, fields, len(data.dataset))
    group.barrier("make the file of predictions")
    writer = RowWriter.open(partial)
    row = data.part.start
    for rows, samples in chain([first] if first else [], outputs):
        if samples:
            check_rows(rows, samples, fields)
            writer.write(row, rows)
            row += samples
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    group.barrier("write the predictions")
    if group.rank == 0:
        os.replace(partial, path)


def make_folder(path: Path) -> None:
    """The folder of a file to be written. Raises UserError."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", "name a file with --output")
    with file_errors(f"{path.parent} cannot be made", "choose another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)


def check_rows(rows: Samples, samples: int, fields: Mapping[str, Field]) -> None:
    """Raises UserError if a batch's outputs would not fit into its rows of the file."""
    for name, field in fields.items():
        found, wanted = rows.get(name), (samples, *field.shape)
        if found is None or found.shape != wanted or found.dtype != field.dtype:
            given = "missing" if found is None else f"{found.dtype}{list(found.shape)}"
            raise UserError(
                f"output {name!r} is {given} for a batch of {samples} samples, not {field.dtype}{list(wanted)}",
                "return arrays with one row for each sample, of the same shape and type in all batches",
            )


def agree_on_fields(head: Samples, group: Group) -> dict[str, Field]:
    """Shapes and dtypes of the outputs; ranks without samples have none."""
    mine = {name: [list(array.shape[1:]), array.dtype.str] for name, array in head.items()}
    told = [each for each in group.allgather(mine, "compare their outputs") if each]
    if any(each != told[0] for each in told):
        raise RunFailed(
            "the model's outputs differ in shape or dtype between ranks", "return arrays of a fixed shape a sample"
        )
    return {name: Field(tuple(shape), np.dtype(kind)) for name, (shape, kind) in told[0].items()}

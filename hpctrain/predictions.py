"""Predictions of all ranks in one HDF5 file, in the order of the data."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.data.dataset import Field, Samples
from hpctrain.data.pipeline import ValidationData
from hpctrain.data.rows import RowWriter, create
from hpctrain.errors import RunFailed
from hpctrain.train.framework import Framework


def write_predictions(framework: Framework, data: ValidationData, group: Group, path: Path) -> None:
    """Each rank predicts its contiguous part and writes it into its rows; the file appears when complete. Collective.

    Raises:
        RunFailed: the ranks' outputs differ in shape or dtype, or the file cannot be written.
    """
    batches = iter(data)
    first = next(batches, None)
    head = framework.predict(first) if first is not None else {}
    fields = agree_on_fields(head, group)
    partial = path.with_name(f".{path.name}.partial")
    if group.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        create(partial, fields, len(data.dataset))
    group.barrier("make the file of predictions")
    writer = RowWriter.open(partial)
    row = data.part.start
    rows: Samples | None = head if first is not None else None
    while rows is not None:
        writer.write(row, rows)
        row += len(next(iter(rows.values())))
        batch = next(batches, None)
        rows = framework.predict(batch) if batch is not None else None
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    group.barrier("write the predictions")
    if group.rank == 0:
        os.replace(partial, path)


def agree_on_fields(head: Samples, group: Group) -> dict[str, Field]:
    """Shapes and dtypes of the outputs; ranks without samples have none to tell."""
    mine = {name: [list(array.shape[1:]), array.dtype.str] for name, array in head.items()}
    told = [each for each in group.allgather(mine, "compare their outputs") if each]
    if any(each != told[0] for each in told):
        raise RunFailed(
            "the model's outputs differ in shape or dtype between ranks", "return arrays of a fixed shape a sample"
        )
    return {name: Field(tuple(shape), np.dtype(kind)) for name, (shape, kind) in told[0].items()}

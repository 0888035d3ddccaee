"""What is trained on: datasets of any kind, the order of their samples over epochs and ranks, and batches made ready.

``formats`` opens what people have, ``packing`` makes HDF5 files of it. Needs neither MPI nor a framework. The names
below are for everybody else; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.data.dataset import Dataset, Field, Samples
    from hpctrain.data.formats.row_file import RowWriter, create_row_file
    from hpctrain.data.formats.sources import open_dataset
    from hpctrain.data.order import Order, part_of
    from hpctrain.data.pipeline import Batch, TrainingData, ValidationData

_MODULES = {
    "Batch": "pipeline",
    "Dataset": "dataset",
    "Field": "dataset",
    "Order": "order",
    "RowWriter": "formats.row_file",
    "Samples": "dataset",
    "TrainingData": "pipeline",
    "ValidationData": "pipeline",
    "create_row_file": "formats.row_file",
    "open_dataset": "formats.sources",
    "part_of": "order",
}

__all__ = [
    "Batch",
    "Dataset",
    "Field",
    "Order",
    "RowWriter",
    "Samples",
    "TrainingData",
    "ValidationData",
    "create_row_file",
    "open_dataset",
    "part_of",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.data.{_MODULES[name]}"), name)

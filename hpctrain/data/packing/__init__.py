"""Making HDF5 files that train fast, from what people have: archives, tables, images, or any dataset.

A ``Source`` gives samples in blocks; ``open_source`` makes one of files, ``from_dataset`` of a dataset, and
``write_hdf5`` writes it. The names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.data.packing.columns import parse_fields
    from hpctrain.data.packing.read import open_source
    from hpctrain.data.packing.source import Source, from_dataset
    from hpctrain.data.packing.write import write_hdf5

_MODULES = {
    "Source": "source",
    "from_dataset": "source",
    "open_source": "read",
    "parse_fields": "columns",
    "write_hdf5": "write",
}

__all__ = ["Source", "from_dataset", "open_source", "parse_fields", "write_hdf5"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.data.packing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.data.packing.{_MODULES[name]}"), name)

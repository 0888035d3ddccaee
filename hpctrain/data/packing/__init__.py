"""Making HDF5 files that train fast, from what people have: archives, tables, images, or any dataset.

A ``Source`` gives samples in blocks; ``open_source`` makes one of files, ``from_dataset`` of a dataset, and
``write_hdf5`` writes it.
"""

from hpctrain.data.packing.columns import parse_fields
from hpctrain.data.packing.read import open_source
from hpctrain.data.packing.source import Source, from_dataset
from hpctrain.data.packing.write import write_hdf5

__all__ = ["Source", "from_dataset", "open_source", "parse_fields", "write_hdf5"]

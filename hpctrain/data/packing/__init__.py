"""Making HDF5 files that train fast, from what people have."""

from hpctrain.data.packing.source import Source, from_dataset
from hpctrain.data.packing.write import write_hdf5

__all__ = ["Source", "from_dataset", "write_hdf5"]

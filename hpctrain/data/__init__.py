"""What is trained on: datasets of any kind, the order of their samples over epochs and ranks, and batches made ready.

The names below are for everybody else. ``formats`` opens what people have and imports what that needs (h5py, a
framework) only then; ``packing`` makes HDF5 files of it. ``samplers`` choose samples, ``padding`` makes batches of
those that differ in length, and ``info`` says what a dataset holds. Needs neither MPI nor a framework.
"""

from hpctrain.data.dataset import Dataset, Field, Samples
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.order import Order, part_of
from hpctrain.data.pipeline import Batch, BatchSource, TrainingData, ValidationData
from hpctrain.data.stream import Stream, StreamingData, StreamOrder, open_stream

__all__ = [
    "Batch",
    "BatchSource",
    "Dataset",
    "Field",
    "Order",
    "Samples",
    "Stream",
    "StreamOrder",
    "StreamingData",
    "TrainingData",
    "ValidationData",
    "open_dataset",
    "open_stream",
    "part_of",
]

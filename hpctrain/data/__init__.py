"""Datasets, their order over epochs and ranks, and prefetching. Needs neither MPI nor a framework."""

from hpctrain.data.dataset import Dataset, Field
from hpctrain.data.formats.sources import open_dataset

__all__ = ["Dataset", "Field", "open_dataset"]

"""Training data: datasets, the order of their samples over epochs and ranks, and batches prefetched for the step.

``dataset`` defines the Dataset protocol, ``formats`` opens supported formats and imports what each needs (h5py, a
framework) only when used, ``packing`` converts data to HDF5 files. ``order`` and ``samplers`` choose samples,
``pipeline`` batches random-access datasets and ``stream`` iterable ones. ``samples`` transforms, checks and stacks
samples, ``padding`` pads them, ``casting`` casts without loss; ``info`` describes a dataset and its source tables,
``tokens`` counts tokens.
``global_generators`` gives streams equal random numbers on all ranks, ``object_reference`` takes an object as data into
worker processes. Needs neither MPI nor a framework.
"""

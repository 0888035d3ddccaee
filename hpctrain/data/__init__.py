"""What is trained on: datasets of any kind, the order of their samples over epochs and ranks, and batches made ready.

``dataset`` says what one is, and ``formats`` opens what people have and imports what that needs (h5py, a framework)
only then; ``packing`` makes HDF5 files of it. ``order`` and ``samplers`` choose samples, ``pipeline`` makes batches of
them, ``stream`` of what has no end; ``padding`` is for those that differ in length, ``info`` says what a dataset holds,
and which tables it is or copies. ``samples`` checks and stacks single ones. Needs neither MPI nor a framework.
"""

"""What a dataset can be: HDF5 files, a torch Dataset, a tf.data pipeline, a function that makes one of these.

``sources.open_dataset`` opens them all, and imports only what the data at hand needs; ``hpctrain.data`` offers it.
``hdf5_files`` finds the files of a dataset. ``row_file`` is the other direction: an HDF5 file into which several
processes write their rows.
"""

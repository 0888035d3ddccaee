"""Data formats: HDF5 files, tables, records, torch Datasets, tf.data pipelines, and functions that return one of them.

``sources.open_dataset`` opens all of them and imports only what the given data needs. ``hdf5_files`` opens HDF5 files
and follows their links, ``hdf5_resolve`` decides how an array is read, ``netcdf`` decodes arrays, ``tables`` opens
tables; ``away`` waits for stores that do not answer, ``block_cache`` keeps what was read.
``torch_dataset`` and ``tf_dataset`` adapt the datasets of frameworks.
"""

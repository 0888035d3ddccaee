"""What a dataset can be: HDF5 files, tables, a torch Dataset, a tf.data pipeline, a function that makes one of these.

``sources.open_dataset`` opens them all, and imports only what the data at hand needs; ``hpctrain.data`` offers it.
``hdf5_files`` finds the files of a dataset, ``stored_hdf5`` those in a store, ``open_table`` a table and its version;
``segments`` keeps on the node's disk what was read of a store. Those of a framework are adapted by its backend.
"""

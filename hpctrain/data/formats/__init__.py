"""What a dataset can be: HDF5, arrays in memory, torch and tf.data."""

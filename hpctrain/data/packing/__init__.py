"""Making HDF5 files that train fast, from what people have: archives, tables, images, or any dataset.

A ``source`` gives samples in blocks; ``read`` opens one of files, with the columns that a table has, ``text`` one
of text by a ``tokenizer``. ``write`` makes the file, with notes on where its samples came from; of tables, several
ranks do, and the file is a ``growing_file``, which is continued if they are killed.
"""

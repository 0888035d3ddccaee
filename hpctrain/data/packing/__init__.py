"""Conversion of archives, tables, images, text or any dataset to HDF5 files that are fast to train from.

A ``pack_source`` yields samples in blocks: ``read`` opens one from files, ``text`` makes one from text with a
tokenizer. ``write`` writes the HDF5 file, with notes on where its samples came from.
"""

"""Making HDF5 files that train fast, from what people have: archives, tables, images, or any dataset.

A ``Source`` gives samples in blocks; ``open_source`` makes one of files, ``text_source`` of text by a tokenizer,
``from_dataset`` of a dataset, and ``write_hdf5`` writes it, with ``notes`` that ``packed_notes`` reads.
"""

from hpctrain.data.packing.columns import parse_fields
from hpctrain.data.packing.notes import packed_notes
from hpctrain.data.packing.read import kind_of, open_source
from hpctrain.data.packing.source import Source, from_dataset
from hpctrain.data.packing.text import TextForm, files_of, text_source
from hpctrain.data.packing.tokenizer import open_tokenizer
from hpctrain.data.packing.write import prepare, write_hdf5

__all__ = [
    "Source",
    "TextForm",
    "files_of",
    "from_dataset",
    "kind_of",
    "open_source",
    "open_tokenizer",
    "packed_notes",
    "parse_fields",
    "prepare",
    "text_source",
    "write_hdf5",
]

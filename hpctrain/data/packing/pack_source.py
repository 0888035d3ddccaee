"""Sources of samples to pack, the columns that form each array, and the notes stored in a packed file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.casting import fit
from hpctrain.data.dataset import Dataset, Field, Samples, is_ordered
from hpctrain.data.formats.hdf5_files import Hdf5File, asking
from hpctrain.data.samples import require_alike
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array

BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class PackSource:
    """Samples of known number and layout, read once in order."""

    fields: Mapping[str, Field]
    """The arrays of a sample."""
    length: int
    """Number of samples."""
    blocks: Callable[[], Iterator[Samples]]
    """Starts to read: yields blocks of samples in order, ``length`` samples in total."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Notes to store in the file, such as class names; JSON values."""
    ordered: bool = True
    """See ``dataset.is_ordered``; a packed file records the order of its arrays only then."""


def block_samples(fields: Mapping[str, Field]) -> int:
    """Samples per block of up to BLOCK_BYTES, at least 1."""
    return max(1, BLOCK_BYTES // max(1, sum(field.num_bytes for field in fields.values())))


def from_dataset(dataset: Dataset) -> PackSource:
    """A source of all samples of a dataset, in storage order.

    Args:
        dataset: a result of ``open_dataset``.

    Raises:
        UserError: the samples differ in shape.
    """
    ragged = [name for name, field in dataset.fields.items() if field.is_ragged]
    if ragged:
        what = f"the samples of {', '.join(map(repr, ragged))} differ in shape, which HDF5 arrays cannot hold"
        raise UserError(what, "pad them to one shape, and keep their lengths in a separate array")
    step = block_samples(dataset.fields)

    def blocks() -> Iterator[Samples]:
        for begin in range(0, len(dataset), step):
            yield dataset.read(np.arange(begin, min(begin + step, len(dataset)), dtype=np.int64))

    return PackSource(dataset.fields, len(dataset), blocks, ordered=is_ordered(dataset))


def join(sources: Sequence[PackSource], names: Sequence[str]) -> PackSource:
    """Concatenate the sources; raises UserError if their fields differ."""
    fix = "pack files with the same arrays, shapes and dtypes together"
    require_alike([source.fields for source in sources], names, fix)
    first = sources[0]

    def blocks() -> Iterator[Samples]:
        for source in sources:
            yield from source.blocks()

    notes = dict(first.notes)
    if "sources" in notes:
        notes["sources"] = [each for source in sources for each in source.notes["sources"]]
    return PackSource(first.fields, sum(source.length for source in sources), blocks, notes, first.ordered)


Columns = Mapping[str, tuple[str, ...]]
"""The columns that form each array. An array of one column has no column axis."""


def assign(wanted: Columns | None, present: Sequence[str], where: str) -> Columns:
    """The columns of each array, by default one array per column; ``*`` stands for all columns not named elsewhere.

    Raises:
        UserError: a column does not exist, or two have the same name.
    """
    if len(set(present)) < len(present):
        raise UserError(f"{where} has two columns of the same name", "rename one of them")
    if wanted is None:
        return {name: (name,) for name in present}
    named = {column for columns in wanted.values() for column in columns}
    missing = sorted(named - set(present) - {"*"})
    if missing:
        raise UserError(f"{where} has no column {missing[0]!r}", f"it has {', '.join(present)}: name some of them")
    rest = [column for column in present if column not in named]
    found = {}
    for name, columns in wanted.items():
        chosen: list[str] = []
        for column in columns:
            chosen += rest if column == "*" else [column]
        found[name] = tuple(chosen)
    return found


def gather(assigned: Columns, columns: Mapping[str, Array], begin: int) -> Samples:
    """Form the arrays from the columns of one block of a table, whose first row is ``begin``."""
    samples = {}
    for name, members in assigned.items():
        if len({columns[member].shape for member in members}) > 1:
            what = f"array {name!r} is made of columns {', '.join(members)}, whose shapes differ"
            raise UserError(what, "put columns of one shape together, and the others into separate arrays")
        dtype = np.result_type(*(columns[member] for member in members))
        parts = [fit(member, columns[member], dtype, begin) for member in members]
        samples[name] = parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
    return samples


def only_names(wanted: Columns | None, kind: str) -> tuple[str, ...] | None:
    """The arrays to take from a file that holds arrays, not columns; None for all. Raises UserError for columns."""
    if wanted and any(columns != (name,) for name, columns in wanted.items()):
        fix = "write --field NAME to take an array"
        raise UserError(f"columns are put together for {kind}, which holds arrays", fix)
    return tuple(wanted) if wanted else None


def parse_fields(texts: Sequence[str]) -> Columns | None:
    """Parse --field arguments: ``name=column,column``, or ``name`` for the column or array of that name."""
    wanted = {}
    for text in texts:
        name, _, columns = text.partition("=")
        if not name or text.endswith("="):
            raise UserError(f"--field {text} names no columns", "write --field x=age,height --field y=label, or x=*")
        wanted[name] = tuple((columns or name).split(","))
    return wanted or None


NOTES = "hpctrain"
"""Attribute of the file that holds the source's notes, as JSON."""


def packed_notes(path: str | Path) -> dict[str, Any]:
    """Read the notes that ``hpctrain data pack`` stored in a file.

    Args:
        path: an HDF5 file, or its URL in an object store.

    Returns:
        For text: ``vocabulary`` (number of distinct tokens), ``context``, ``tokenizer`` (name of its file, or
        bytes), ``tokenizer_sha256``, ``end_of_text`` (a token), ``documents`` and ``tokens`` (counts). For images:
        ``classes``, a list of names. For tables: ``sources``, a list of dicts. Empty if the file has no notes.

    Raises:
        UserError: the file is missing, is not HDF5, or its notes are damaged.
    """
    path = Path(path)
    with asking(path), Hdf5File(path) as file:
        text = file.root.attrs.get(NOTES, "{}")
    try:
        notes = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        notes = None
    if not isinstance(notes, dict):
        fix = "pack the file again"
        raise UserError(f"the attribute {NOTES!r} of {path} holds no notes of hpctrain data pack", fix)
    return notes

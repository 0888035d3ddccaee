"""What is packed: samples that come in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.data.dataset import Dataset, Field, Samples
from hpctrain.data.samples import layout
from hpctrain.errors import UserError

BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Piece:
    """Some consecutive samples of a source."""

    key: str
    """Of what they are made from, and how: anything else has another key."""
    length: int
    """Number of samples, at least 1."""
    blocks: Callable[[], Iterator[Samples]]
    """Begins to read, as that of a source."""


@dataclass(frozen=True)
class Source:
    """Samples of known number and layout, read once, from the first to the last."""

    fields: Mapping[str, Field]
    """The arrays of a sample."""
    length: int
    """Number of samples."""
    blocks: Callable[[], Iterator[Samples]]
    """Begins to read: some samples at a time, in order, ``length`` in all."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the file should say about itself, such as the names of classes; JSON-able."""
    pieces: Sequence[Piece] = ()
    """All samples, if some can be read without those before them; in order."""


def block_samples(fields: Mapping[str, Field]) -> int:
    """Samples that are worth reading at once."""
    return max(1, BLOCK_BYTES // max(1, sum(field.num_bytes for field in fields.values())))


def from_dataset(dataset: Dataset) -> Source:
    """Any dataset as something to pack, in the order in which it is stored.

    Args:
        dataset: as ``open_dataset`` gives it.

    Raises:
        UserError: its samples differ in shape.
    """
    ragged = [name for name, field in dataset.fields.items() if field.is_ragged]
    if ragged:
        raise UserError(
            f"the samples of {', '.join(map(repr, ragged))} differ in shape, which HDF5 arrays cannot hold",
            "pad them to one shape, and keep their lengths in a separate array",
        )
    step = block_samples(dataset.fields)

    def blocks() -> Iterator[Samples]:
        for begin in range(0, len(dataset), step):
            yield dataset.read(np.arange(begin, min(begin + step, len(dataset)), dtype=np.int64))

    return Source(dataset.fields, len(dataset), blocks)


def join(sources: Sequence[Source], names: Sequence[str]) -> Source:
    """The sources one after the other; raises UserError if their fields differ."""
    first = sources[0]
    for source, name in zip(sources, names, strict=True):
        if dict(source.fields) != dict(first.fields):
            raise UserError(
                f"{name} holds {layout(source.fields)} but {names[0]} holds {layout(first.fields)}",
                "pack files with the same arrays, shapes and dtypes together",
            )

    def blocks() -> Iterator[Samples]:
        for source in sources:
            yield from source.blocks()

    notes = dict(first.notes)
    if "sources" in notes:
        notes["sources"] = [each for source in sources for each in source.notes["sources"]]
    pieces = [piece for source in sources for piece in source.pieces] if all(each.pieces for each in sources) else []
    return Source(first.fields, sum(source.length for source in sources), blocks, notes, pieces)

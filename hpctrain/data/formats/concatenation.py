"""Several datasets as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Field, Samples, content_fingerprint
from hpctrain.data.samples import grouped, layout
from hpctrain.errors import UserError


class ConcatDataset:
    """The samples of the parts, one part after the other. Use ``concatenate``, which checks them."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.parts = parts
        self.fields: Mapping[str, Field] = parts[0].fields
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, indices: NDArray[np.int64]) -> Samples:
        samples = {name: field.make_rows(len(indices)) for name, field in self.fields.items()}
        for index, rows in grouped(np.searchsorted(self.ends, indices, side="right")):
            part = self.parts[index]
            for name, values in part.read(indices[rows] - (self.ends[index] - len(part))).items():
                samples[name][rows] = values
        return samples

    def fingerprint(self) -> str:
        return content_fingerprint(self)


def concatenate(parts: Sequence[Dataset], names: Sequence[str]) -> Dataset:
    """The parts as one dataset; ``names`` tell them apart in errors. Raises UserError if their fields differ."""
    for part, name in zip(parts, names, strict=True):
        if dict(part.fields) != dict(parts[0].fields):
            raise UserError(
                f"{name} holds {layout(part.fields)} but {names[0]} holds {layout(parts[0].fields)}",
                "give files with the same arrays, shapes and dtypes, or name only arrays that they share",
            )
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)

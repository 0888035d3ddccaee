"""What the attributes of netCDF say about the values of an HDF5 array: packed numbers, and marks of missing values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import h5py
import numpy as np

from hpctrain.errors import UserError
from hpctrain.system.array_types import Array, Bools, Ints

FIX = 'decode it: hpctrain.open_dataset(..., decode="netcdf"), or hpctrain data pack --kind netcdf'


class NetcdfReader(Protocol):
    """Reads samples of one array."""

    @property
    def layout(self) -> str:
        """Storage layout, for display."""

    def take(self, indices: Ints) -> Array:
        """The samples at these indices, as a new array."""


@dataclass(frozen=True)
class Meaning:
    """What stored values mean; see "Packed data" and "Missing data" in the CF conventions."""

    scale: Any = 1
    """``scale_factor``; the scalar's dtype decides that of the result, as in netCDF4-python."""
    offset: Any = 0
    """``add_offset``."""
    missing: tuple[float, ...] = ()
    """``_FillValue`` and ``missing_value``, in the stored dtype; without NaN, which marks itself."""
    unsigned: bool = False
    """``_Unsigned``: signed integers are stored for unsigned ones."""

    @property
    def is_packed(self) -> bool:
        """Whether stored values are other numbers than those meant."""
        return bool(self.unsigned or self.scale != 1 or self.offset != 0)

    def __str__(self) -> str:
        return f"scale_factor {self.scale}, add_offset {self.offset}" + ", _Unsigned" * self.unsigned

    def gone(self, raw: Array) -> Bools:
        """Which stored values mark missing ones."""
        return np.isin(raw, np.array(self.missing, raw.dtype))

    def decoded(self, raw: Array) -> Array:
        """The values meant, as floats with NaN for missing ones if the array marks any."""
        gone = self.gone(raw)
        if self.unsigned:
            raw = raw.view(f"u{raw.itemsize}")
        values = raw * self.scale + self.offset if self.scale != 1 or self.offset != 0 else raw
        if self.missing:
            values = values.astype(np.result_type(values, np.float16 if values.dtype.kind == "f" else np.float32))
            values[gone] = np.nan
        return values


def meaning_of(dataset: h5py.Dataset) -> Meaning:
    """What a dataset's attributes say about its values."""
    dtype = dataset.dtype
    if dtype.kind not in "iuf" or not len(dataset.attrs):
        return Meaning()

    def number(name: str) -> Array:
        value = np.ravel(dataset.attrs.get(name, ()))
        return value if value.dtype.kind in "iuf" else np.empty(0)

    def mark(name: str) -> Array:
        value = number(name)
        if value.dtype.kind == "f" and dtype.kind != "f":  # NaN, or a mark of the unpacked values: stored nowhere
            limits = np.iinfo(dtype)
            value = value[(value % 1 == 0) & (value >= float(limits.min)) & (value <= float(limits.max))]
        return value.astype(dtype)

    scale, offset = number("scale_factor"), number("add_offset")
    marks = np.concatenate([mark("_FillValue"), mark("missing_value")])
    unsigned = dtype.kind == "i" and str(np.ravel(dataset.attrs.get("_Unsigned", ""))[0]).lower() in ("true", "b'true'")
    missing = tuple(np.unique(marks[marks == marks]).tolist())
    return Meaning(scale[0] if len(scale) else 1, offset[0] if len(offset) else 0, missing, unsigned)


@dataclass(eq=False)
class MeantArray:
    """An array whose values are decoded, or refused if they are marked as missing."""

    array: NetcdfReader
    meaning: Meaning
    decodes: bool
    where: str

    @property
    def layout(self) -> str:
        """Storage layout, for display."""
        return self.array.layout

    def take(self, indices: Ints) -> Array:
        """See ``NetcdfReader``."""
        raw = self.array.take(indices)
        if self.decodes:
            return self.meaning.decoded(raw)
        gone = self.meaning.gone(raw)
        if gone.any():
            row = int(np.argwhere(gone)[0][0])
            raise UserError(
                f"{self.where}: {int(gone[row].sum())} of {gone[row].size} values of sample {indices[row]} are "
                f"{raw[row][gone[row]].ravel()[0]}, which marks missing values",
                FIX,
            )
        return raw


def meant(array: NetcdfReader, meaning: Meaning, decodes: bool, where: str) -> NetcdfReader:
    """The array with its meaning; raises UserError if it is packed and not decoded."""
    if meaning.is_packed and not decodes:
        raise UserError(f"{where} holds packed numbers: {meaning}", FIX)
    return MeantArray(array, meaning, decodes, where) if meaning != Meaning() else array

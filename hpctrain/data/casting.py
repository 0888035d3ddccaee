"""Casts of arrays that lose nothing but digits behind the point."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.errors import UserError
from hpctrain.system.array_types import Array, Bools


def fit(name: str, values: Array, dtype: np.dtype[Any], begin: int) -> Array:
    """Cast the values, C-contiguous. Floats may be rounded; raises UserError if a value overflows, a whole number is
    rounded, or a fraction or an imaginary part is lost."""
    if values.dtype == dtype:
        return np.ascontiguousarray(values)
    loses_imaginary = values.dtype.kind == "c" and dtype.kind != "c"
    kept = values.real if loses_imaginary else values
    with np.errstate(all="ignore"):
        cast = np.ascontiguousarray(kept.astype(dtype))
        if dtype.kind in "biu":
            wrong = cast != kept
        elif kept.dtype.kind in "iu":  # compared as whole numbers: as floats, both would be rounded
            wrong = ~is_exact(cast.real, kept)
        else:
            wrong = np.isfinite(kept) & ~np.isfinite(cast)
    if loses_imaginary:
        wrong = wrong | (values.imag != 0)
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        value = values[row][wrong[row]].ravel()[0] if values.ndim > 1 else values[row]
        fix = "choose a wider dtype"
        raise UserError(f"{name!r} of sample {begin + row} holds {value}, which {dtype} cannot hold", fix)
    return cast


def is_exact(floats: Array, whole: Array) -> Bools:
    """Where floats hold these whole numbers exactly."""
    bounds = np.iinfo(whole.dtype)
    fits = (floats >= float(bounds.min)) & (floats < float(bounds.max) + 1)  # others have no defined cast
    exact: Bools = fits & (np.where(fits, floats, 0).astype(whole.dtype) == whole)
    return exact

"""Arrays from one floating-point type to another; bfloat16 is held as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.layout import ITEM_TYPES


def converted(array: NDArray[Any], dtype: str, wanted: str) -> NDArray[Any]:
    """The array in another floating-point type; values are rounded if that has fewer bits."""
    if dtype == wanted:
        return array
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if wanted == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even; NaN excepted
    return array.astype(ITEM_TYPES[wanted])

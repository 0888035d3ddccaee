"""Names of the array types that signatures use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""Any dtype."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Reals = NDArray[np.floating]
"""Of any precision."""
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]

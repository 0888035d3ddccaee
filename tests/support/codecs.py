"""What the frameworks' casts to 16 bits compute, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.reduce.streamed_allreduce import Codec


class Float16:
    """IEEE half precision: 11 significant bits, magnitudes from 6e-8 to 65504."""

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            out.view(np.float16)[...] = values

    def decode(self, packed: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        out[...] = packed.view(np.float16)


class BFloat16:
    """The upper half of fp32: 8 significant bits, all of fp32's range."""

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        bits = values.view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
        out[...] = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)

    def decode(self, packed: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        np.left_shift(packed, 16, out=out.view(np.uint32), dtype=np.uint32)


CODECS: dict[str, Codec] = {"fp16": Float16(), "bf16": BFloat16()}

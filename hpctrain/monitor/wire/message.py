"""What agents send each other, as bytes: a JSON header and float32 arrays."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("!I")


class ProtocolError(Exception):
    """The peer is not an agent of this run."""


@dataclass(frozen=True)
class Message:
    """A kind, JSON fields and arrays."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The message as bytes."""
        shapes = {name: list(array.shape) for name, array in self.arrays.items()}
        header = json.dumps({"kind": self.kind, "fields": self.fields, "arrays": shapes}).encode()
        payload = (np.ascontiguousarray(array, dtype="<f4").tobytes() for array in self.arrays.values())
        return b"".join((HEADER.pack(len(header)), header, *payload))

    @classmethod
    def decode(cls, content: bytes) -> Message:
        """The inverse of ``encode``.

        Raises:
            ProtocolError: no message was encoded like this.
        """
        try:
            begin = HEADER.size + HEADER.unpack_from(content)[0]
            parsed = json.loads(content[HEADER.size : begin])
            arrays = {}
            for name, shape in parsed["arrays"].items():
                count = int(np.prod(shape, dtype=np.int64))
                arrays[name] = np.frombuffer(content, dtype="<f4", count=count, offset=begin).reshape(shape)
                begin += 4 * count
            return cls(str(parsed["kind"]), dict(parsed["fields"]), arrays)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
            raise ProtocolError(f"a message cannot be read: {error}") from error

"""Messages between agents, as the contents of frames of ``system.channel``. Pure; ``connection`` handles sockets."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.system.channel import ProtocolError

HEADER = struct.Struct("!I")


@dataclass(frozen=True)
class Message:
    """A message: its kind, JSON fields and float32 arrays."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Encodes the message."""
        shapes = {name: list(array.shape) for name, array in self.arrays.items()}
        header = json.dumps({"kind": self.kind, "fields": self.fields, "arrays": shapes}).encode()
        payload = (np.ascontiguousarray(array, dtype="<f4").tobytes() for array in self.arrays.values())
        return b"".join((HEADER.pack(len(header)), header, *payload))

    @classmethod
    def decode(cls, content: bytes) -> Message:
        """The inverse of ``encode``.

        Raises:
            ProtocolError: the content is not an encoded message.
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

"""The tensors of a checkpoint, whole or in any part, read and verified on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.boxes import Box, everything
from hpctrain.checkpoint.format.layout import ITEM_TYPES, Manifest, Shard, StoredPiece, TensorSpec
from hpctrain.checkpoint.format.shard_reading import ShardFiles
from hpctrain.train.saved_arrays import SavedArrays, require_inside

Read = Callable[[], NDArray[Any]]


def at_once(read: Read) -> NDArray[Any]:
    """Reads once: errors of the file system are left to the caller."""
    return read()


class Contents(SavedArrays):
    """Arrays by name, bfloat16 as uint16; each access reads the file again. Close it after use.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        rank: whose own values count; None if those of ``merged`` do.
        merged: values of rank-local tensors, merged over all ranks.
        patience: calls what reads one tensor, and may call it again if it raises UnreadableCheckpoint.

    Reading one raises DamagedCheckpoint, UnreadableCheckpoint and UserError, see ``ShardFiles.read``.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        rank: int | None,
        merged: Mapping[str, NDArray[Any]],
        patience: Callable[[Read], NDArray[Any]] = at_once,
    ) -> None:
        self.files = ShardFiles(folder)
        self.merged = merged
        self.patience = patience
        self.pieces: dict[str, list[tuple[Shard, StoredPiece]]] = {}
        """Stored pieces by tensor name."""
        self.names: dict[str, TensorSpec] = {}
        """All tensors, in the order of the shards."""
        super().__init__(self.names)
        for shard in manifest.shards:
            for stored in shard.pieces:
                tensor = stored.piece.tensor
                if tensor.rank is None or tensor.rank == rank:
                    self.pieces.setdefault(tensor.name, []).append((shard, stored))
                    self.names[tensor.name] = tensor
                elif tensor.name in merged:
                    self.names.setdefault(tensor.name, tensor)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self.merged:
            return self.merged[name]
        return self._read(name, everything(self.names[name].shape))

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.merged[name].shape if name in self.merged else self.names[name].shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return self.merged[name].dtype if name in self.merged else ITEM_TYPES[self.names[name].dtype]

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        require_inside(name, begin, shape, self.shape_of(name))
        wanted = Box(tuple(begin), tuple(shape))
        return self.merged[name][wanted.index] if name in self.merged else self._read(name, wanted)

    def close(self) -> None:
        """Closes the files; they are opened again when they are needed."""
        self.files.close()

    def _read(self, name: str, wanted: Box) -> NDArray[Any]:
        return self.patience(lambda: self._read_once(name, wanted))

    def _read_once(self, name: str, wanted: Box) -> NDArray[Any]:
        out = self.files.allocate(wanted.shape, self.names[name].dtype)
        for shard, stored in self.pieces[name]:
            self.files.read(shard, stored, wanted, out)
        return out

"""Opens the host-memory sum that a candidate names: over one flat buffer, or over several arrays sent together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from hpctrain.comm.group import Group
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import SLOTS, Layout
from hpctrain.reduce.mpi_allreduce import FlatAllreduce, HostAllreduce, duplicate
from hpctrain.reduce.shm_allreduce import (
    ShmPieces,
    open_shm_allreduce,
    open_shm_pieces,
    open_shm_small,
    share_arrays,
    with_square,
)
from hpctrain.reduce.streamed_allreduce import Codec, StreamedAllreduce
from hpctrain.system.array_types import Array


def open_host_allreduce(
    candidate: Candidate, group: Group, length: int, dtype: DTypeLike, codecs: Mapping[str, Codec]
) -> tuple[Candidate, HostAllreduce]:
    """Opens an MPI candidate's sum; returns it with the candidate used: flat if ranks cannot share memory.

    Collective over the group.

    Args:
        candidate: the chosen candidate.
        group: the ranks.
        length: elements of the buffer, including the extra slots of flat_layout.py at its end.
        dtype: dtype of the buffer.
        codecs: 16-bit codecs by compression name.
    """
    if candidate.way in ("overlap", "pieces") or candidate.compression != "none":
        codec = codecs.get(candidate.compression)
        return candidate, open_streamed_allreduce(group, length, dtype, codec, node_first=candidate.way != "flat")
    if candidate.way == "node":
        shared = open_shm_small(group, length, dtype) or open_shm_allreduce(group, length, dtype)
        if shared is not None:
            return candidate, shared
    return Candidate("mpi", "flat"), FlatAllreduce(group, length, dtype)


def open_streamed_allreduce(
    group: Group, length: int, dtype: DTypeLike, codec: Codec | None = None, node_first: bool = True
) -> StreamedAllreduce:
    """Opens a sum in pieces, first within a node if its ranks share memory. Collective over the group."""
    dtype = dtype if codec is None else np.float32
    shared = share_arrays(group, length, dtype) if node_first else None
    if shared is None:
        all_ranks = Group(group.name, duplicate(group))
        return StreamedAllreduce(all_ranks, [np.zeros(length, dtype)], codec, length - SLOTS)
    return StreamedAllreduce(Group("peers", shared.peers), shared.arrays, codec, length - SLOTS, shared.node)


class BufferedPieces:
    """Sums arrays over the ranks by copying them into the flat buffer of a host sum. Every rank makes the same calls in
    the same order."""

    def __init__(self, host: HostAllreduce, layout: Layout, shapes: Sequence[tuple[int, ...]]) -> None:
        self.host = host
        self.dtype = host.buffer.dtype
        self.views = views(host.buffer, layout, shapes)
        self.slots = host.buffer[layout.gradients :]
        self.close = host.close

    def sum(self, *pieces: Array) -> list[Array]:
        """Returns sums of the same shapes; read-only, and valid until the next call.

        The last piece holds the slots; SQUARE is filled in.
        """
        for view, piece in zip([*self.views, self.slots], pieces, strict=True):
            np.copyto(view, piece)
        self.host.start(0, len(self.host.buffer))
        self.host.finish()
        flat = (view.reshape(-1) for view in self.views)
        return [*self.views, with_square(self.slots, sum(float(np.dot(part, part)) for part in flat))]


PieceAllreduce: TypeAlias = BufferedPieces | ShmPieces


def views(flat_buffer: Array, layout: Layout, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Views of each piece in a flat buffer."""
    places = zip(layout.offsets, layout.sizes, shapes, strict=True)
    return [flat_buffer[offset : offset + size].reshape(shape) for offset, size, shape in places]


def open_piece_allreduce(
    candidate: Candidate,
    group: Group,
    layout: Layout,
    shapes: Sequence[tuple[int, ...]],
    dtype: DTypeLike,
    codecs: Mapping[str, Codec],
) -> tuple[Candidate, PieceAllreduce]:
    """Like ``open_host_allreduce``, for several arrays.

    Args:
        candidate: the chosen candidate.
        group: the ranks.
        layout: layout of the pieces in a flat buffer; the extra slots form the last piece.
        shapes: shapes of the other pieces.
        dtype: dtype of the pieces.
        codecs: 16-bit codecs by compression name.
    """
    if candidate.way == "node":
        if (small := open_shm_small(group, layout.length, dtype)) is not None:
            return candidate, BufferedPieces(small, layout, shapes)
        shared = open_shm_pieces(group, layout, shapes, dtype)
        if shared is not None:
            return candidate, shared
    candidate, host = open_host_allreduce(candidate, group, layout.length, dtype, codecs)
    return candidate, BufferedPieces(host, layout, shapes)

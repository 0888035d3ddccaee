"""Decides which rank writes which parts of a checkpoint, from what the ranks hold; no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.checkpoint.format.boxes import Box, Coordinates
from hpctrain.checkpoint.format.layout import TensorPiece, TensorSpec, check_tensors, partition, tiles, whole
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.saved_arrays import lies_in
from hpctrain.train.state import Cut, Placement, StateTensor


def share_of(
    tensors: Sequence[StateTensor], group: Group, peers: Group, copies: Group, writers: Sequence[int]
) -> tuple[list[tuple[int, TensorPiece]], int]:
    """The pieces that this rank writes, each with the index of its tensor, and the approximate bytes of all ranks.

    Args:
        tensors: this rank's state.
        group: all ranks, of which the first writes tensors with placement FIRST.
        peers: the group whose rank numbers identify rank-local state.
        copies: ranks with the same rank-local state, of which the first writes it.
        writers: ranks that split the writing of replicated state.

    Raises:
        UserError: names or types cannot be stored (the same on all ranks).
    """
    specs = [spec_of(it, peers) for it in tensors]
    at = {placement: [i for i, it in enumerate(tensors) if it.placement is placement] for placement in Placement}
    cut = [(i, specs[i], tensors[i].cut) for i in at[Placement.CUT]]
    parts = {spec.name: spec for _, spec, _ in cut}  # a rank may hold several parts of a tensor
    check_tensors([*parts.values(), *(specs[i] for i, it in enumerate(tensors) if it.placement is not Placement.CUT)])

    pieces: list[tuple[int, TensorPiece]] = []
    if group.rank in writers:
        replicated = {specs[i].name: i for i in at[Placement.REPLICATED]}
        mine = partition([specs[i] for i in replicated.values()], len(writers))[writers.index(group.rank)]
        pieces += [(replicated[piece.tensor.name], piece) for piece in mine]
    pieces += pieces_of_cut(cut)
    if copies.rank == 0:
        pieces += [(i, whole(specs[i])) for i in at[Placement.RANK]]
    if group.rank == 0:
        pieces += [(i, whole(specs[i])) for i in at[Placement.FIRST]]

    tiled = [(i, tile) for i, piece in pieces for tile in tiles_of(tensors[i], piece)]
    return tiled, sum(bytes_everywhere(it, spec, group, peers) for it, spec in zip(tensors, specs, strict=True))


def spec_of(tensor: StateTensor, peers: Group) -> TensorSpec:
    """What the manifest says of a tensor; rank-local state is named after its rank."""
    owner = peers.rank if tensor.placement is Placement.RANK else None
    return TensorSpec(tensor.name, tensor.shape, tensor.dtype, owner)


def bytes_everywhere(tensor: StateTensor, spec: TensorSpec, group: Group, peers: Group) -> int:
    """Approximate bytes that a checkpoint has of a tensor, if this rank holds as much of it as the others."""
    if tensor.cut:
        return spec.num_bytes * group.size // tensor.cut.copies
    return spec.num_bytes * (peers.size if tensor.placement is Placement.RANK else 1)


def pieces_of_cut(tensors: Sequence[tuple[int, TensorSpec, Cut | None]]) -> list[tuple[int, TensorPiece]]:
    """The pieces of partitioned tensors that this rank writes; ranks that hold the same part split its rows.

    Args:
        tensors: for each, its index, its local part, and the part's location in the whole tensor.

    Raises:
        UserError: a location is missing, or the part is not inside the whole tensor.
    """
    held_by: dict[tuple[int, int, Sequence[int]], list[tuple[int, TensorSpec, Cut]]] = {}
    for index, spec, cut in tensors:
        if cut is None or not lies_in(cut.begin, spec.shape, cut.shape) or not 0 <= cut.copy < cut.copies:
            raise UserError(
                f"{spec.name}, of shape {list(spec.shape)}, is not a part of a tensor as its cut says: {cut}",
                "give the shape of the whole tensor, and the index of the part's first value in every axis",
            )
        held_by.setdefault((cut.copy, cut.copies, cut.stages), []).append((index, spec, cut))
    pieces = []
    for (copy, copies, _), same in held_by.items():
        place_of = {id(spec): (index, cut) for index, spec, cut in same}  # several may have one name
        for piece in partition([spec for _, spec, _ in same], copies)[copy]:
            index, where = place_of[id(piece.tensor)]
            tensor = replace(piece.tensor, shape=where.shape)
            begin = tuple(map(int.__add__, piece.box.begin, where.begin))
            pieces.append((index, TensorPiece(tensor, Box(begin, piece.shape))))
    return pieces


def tiles_of(tensor: StateTensor, piece: TensorPiece) -> list[TensorPiece]:
    """Split a piece by its tensor's tiling, if it has one."""
    return tiles(piece, tensor.tiling.axis, tensor.tiling.parts) if tensor.tiling else [piece]


def place_in(cut: Cut | None, piece: TensorPiece) -> Coordinates:
    """Start of a piece in this rank's part of its tensor."""
    return piece.box.seen_from(cut.begin).begin if cut else piece.box.begin

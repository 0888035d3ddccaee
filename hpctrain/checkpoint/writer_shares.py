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
    specs: dict[Placement, dict[int, TensorSpec]] = {placement: {} for placement in Placement}
    for index, it in enumerate(tensors):
        owner = peers.rank if it.placement is Placement.RANK else None
        specs[it.placement][index] = TensorSpec(it.name, tuple(it.shape), it.dtype, owner)
    cut_names = {spec.name: spec for spec in specs[Placement.CUT].values()}  # a rank may hold several parts of a tensor
    check_tensors([*cut_names.values(), *(spec for it in specs if it != "cut" for spec in specs[it].values())])
    cut = [(index, spec, tensors[index].cut) for index, spec in specs[Placement.CUT].items()]
    num_bytes = {placement: sum(spec.num_bytes for spec in each.values()) for placement, each in specs.items()}
    num_bytes[Placement.RANK] *= peers.size
    num_bytes[Placement.CUT] = sum(spec.num_bytes * group.size // where.copies for _, spec, where in cut if where)
    own = specs[Placement.RANK] if copies.rank == 0 else {}
    own |= specs[Placement.FIRST] if group.rank == 0 else {}
    sources = [*pieces_of_cut(cut), *((index, whole(spec)) for index, spec in own.items())]
    if group.rank in writers:
        index_of = {spec.name: index for index, spec in specs[Placement.REPLICATED].items()}
        parts = partition(list(specs[Placement.REPLICATED].values()), len(writers))
        mine = parts[writers.index(group.rank)]
        sources = [*((index_of[piece.tensor.name], piece) for piece in mine), *sources]
    return [(at, tile) for at, piece in sources for tile in tiles_of(tensors[at], piece)], sum(num_bytes.values())


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

"""Decides which rank writes which parts of a checkpoint, from what the ranks hold; no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.checkpoint.format.boxes import Box, Coordinates
from hpctrain.checkpoint.format.layout import TensorPiece, TensorSpec, check_tensors, partition, tiles, whole_tensor
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
    placed: dict[Placement, list[tuple[int, TensorSpec]]] = {placement: [] for placement in Placement}
    parts: dict[str, TensorSpec] = {}  # a rank may hold several parts of a tensor
    others: list[TensorSpec] = []
    total_bytes = 0
    for index, tensor in enumerate(tensors):
        spec = spec_of(tensor, peers)
        placed[tensor.placement].append((index, spec))
        total_bytes += bytes_everywhere(tensor, spec, group, peers)
        if tensor.placement is Placement.CUT:
            parts[spec.name] = spec
        else:
            others.append(spec)
    check_tensors([*parts.values(), *others])

    pieces: list[tuple[int, TensorPiece]] = []
    if group.rank in writers:
        replicated = placed[Placement.REPLICATED]
        index_of = {spec.name: index for index, spec in replicated}
        mine = partition([spec for _, spec in replicated], len(writers))[writers.index(group.rank)]
        pieces += [(index_of[piece.tensor.name], piece) for piece in mine]
    pieces += pieces_of_cut([(index, spec, tensors[index].cut) for index, spec in placed[Placement.CUT]])
    if copies.rank == 0:
        pieces += [(index, whole_tensor(spec)) for index, spec in placed[Placement.RANK]]
    if group.rank == 0:
        pieces += [(index, whole_tensor(spec)) for index, spec in placed[Placement.FIRST]]

    tiled = [(index, tile) for index, piece in pieces for tile in tiles_of(tensors[index], piece)]
    return tiled, total_bytes


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
            index, cut = place_of[id(piece.tensor)]
            tensor = replace(piece.tensor, shape=cut.shape)
            begin = tuple(map(int.__add__, piece.box.begin, cut.begin))
            pieces.append((index, TensorPiece(tensor, Box(begin, piece.shape))))
    return pieces


def tiles_of(tensor: StateTensor, piece: TensorPiece) -> list[TensorPiece]:
    """Split a piece by its tensor's tiling, if it has one."""
    return tiles(piece, tensor.tiling.axis, tensor.tiling.parts) if tensor.tiling else [piece]


def place_in(cut: Cut | None, piece: TensorPiece) -> Coordinates:
    """Start of a piece in this rank's part of its tensor."""
    return piece.box.seen_from(cut.begin).begin if cut else piece.box.begin

"""Every row has exactly one writer, and writers have equal shares."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import layout as module
from hpctrain.checkpoint.format.boxes import Box, tiling_problem
from hpctrain.checkpoint.format.layout import (
    TensorPiece,
    TensorSpec,
    named_apart,
    partition,
    rows_of,
    tiles,
    whole_tensor,
)
from hpctrain.checkpoint.writer_shares import pieces_of_cut
from hpctrain.train.state import Cut
from tests.support import tilings

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=20)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPLIT_BYTES", 64)
    monkeypatch.setattr(module, "LEAST_TILE_BYTES", 64)


@given(shapes, st.integers(1, 9))
def test_every_row_is_written_once_in_order(shapes, writers):
    tensors = [TensorSpec(f"t{index}", shape, "float32") for index, shape in enumerate(shapes)]
    parts = partition(tensors, writers)
    assert len(parts) == writers
    rows: dict[str, list[int]] = defaultdict(list)
    for part in parts:
        for piece in part:
            (first, *_), (count, *_) = (piece.box.begin or (0,)), (piece.box.shape or (1,))
            rows[piece.tensor.name] += range(first, first + count)
            assert piece.box.begin[1:] == (0,) * len(piece.shape[1:]) and piece.shape[1:] == piece.tensor.shape[1:]
    assert {piece.tensor.name for part in parts for piece in part} == {tensor.name for tensor in tensors}
    assert all(rows[tensor.name] == list(range(tensor.rows)) for tensor in tensors)
    written = Counter(piece.tensor.name for part in parts for piece in part)
    assert all(written[tensor.name] == 1 for tensor in tensors if not tensor.rows)


@given(shapes, st.integers(1, 9))
def test_shares_are_equal_within_a_row_or_a_small_tensor(shapes, writers):
    tensors = [TensorSpec(f"t{index}", shape, "float32") for index, shape in enumerate(shapes)]
    largest = max([64, *(tensor.row_bytes for tensor in tensors)])
    mean = sum(tensor.num_bytes for tensor in tensors) / writers
    for part in partition(tensors, writers):
        assert abs(sum(piece.num_bytes for piece in part) - mean) <= largest + 1


def test_an_empty_tensor_between_two_writers_is_written_once():
    tensors = [TensorSpec(name, (rows,), "float32") for name, rows in (("a", 15), ("empty", 0), ("b", 10))]
    names = [[piece.tensor.name for piece in part] for part in partition(tensors, 2)]
    assert names == [["a"], ["empty", "b"]]


def test_each_set_of_ranks_that_has_a_part_splits_it_among_itself():
    """Rank 0 has ``a`` with rank 1, and ``b`` with rank 2."""
    held = {0: {"a": (0, 1), "b": (0, 2)}, 1: {"a": (0, 1)}, 2: {"b": (0, 2)}}
    written = []
    for rank, own in held.items():
        spec = [TensorSpec(name, (40,), "float32") for name in own]
        cuts = [Cut((40,), (0,), stages.index(rank), 2, stages) for stages in own.values()]
        written += [piece for _, piece in pieces_of_cut(list(zip(range(len(own)), spec, cuts, strict=True)))]
    for name in ("a", "b"):
        assert tiling_problem((40,), [piece.box for piece in written if piece.tensor.name == name]) is None


@pytest.mark.parametrize(("rows", "writers"), [(1023, 1), (1024, 2)])
def test_a_tensor_is_shared_out_from_a_mebibyte_on(monkeypatch, rows, writers):
    monkeypatch.undo()  # of the small splits
    parts = partition([TensorSpec("a", (rows, 256), "float32")], 2)
    assert sum(bool(part) for part in parts) == writers


def test_thousands_of_writers_and_tensors_take_no_time():
    tensors = [TensorSpec(f"t{index}", (64, 64), "float32") for index in range(5000)]
    assert sum(map(len, partition(tensors, 4096))) >= 5000


@given(st.data(), tilings.shapes, st.integers(0, 2), st.integers(1, 3))
def test_tiles_are_the_same_elements_in_pieces(data, shape, axis, parts):
    box = data.draw(tilings.boxes_within(shape))
    found = tiles(TensorPiece(TensorSpec("t", shape, "float32"), box), axis, parts)
    assert tiling_problem(box.shape, [piece.box.seen_from(box.begin) for piece in found]) is None


@pytest.mark.parametrize(("axis", "parts"), [(0, 1), (0, 3), (1, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tiles_end_where_any_rank_s_part_ends(axis, parts, ranks):
    """Whichever ranks write and read; and there are no more than that takes."""
    tensor = TensorSpec("t", (240, 960), "float32")
    length = tensor.shape[axis] // parts // ranks
    written = [tiles(piece, axis, parts) for mine in partition([tensor], 3) for piece in mine]
    for first in range(0, tensor.shape[axis], length):
        begin, end = (first, 0) if axis == 0 else (0, first), (length, 960) if axis == 0 else (240, length)
        for piece in (piece for pieces in written for piece in pieces):
            assert piece.box.overlap(Box(begin, end)).size in (0, piece.box.size)
    assert max(map(len, written)) <= 8 * parts


def test_the_columns_of_very_many_writers_are_not_cut_into_crumbs(monkeypatch):
    """64 of them have 16 KiB each of a tensor of 1 MiB."""
    monkeypatch.undo()  # of the small splits
    tensor = TensorSpec("t", (512, 512), "float32")
    written = [tiles(rows_of(tensor, 8 * writer, 8), 1, 1) for writer in range(64)]
    assert {piece.num_bytes for pieces in written for piece in pieces} == {4096}
    assert len(tiles(rows_of(tensor, 8, 8), 0, 1)) == 1


def test_small_tensors_are_not_cut_into_tiles():
    for count in (1, 2, 4, 8):
        rows = count * module.LEAST_TILE_BYTES // 4 // 8
        for shape in ((rows, 8), (8, rows)):
            piece = TensorPiece(TensorSpec("t", shape, "float32"), Box((0, 0), shape))
            assert [len(tiles(piece, axis, 1)) for axis in range(3)] == [count, count, 1]
            assert all(sum(tile.box.size for tile in tiles(piece, axis, 1)) == 8 * rows for axis in range(3))


def test_pieces_of_one_tensor_in_a_shard_have_names_of_their_own():
    alone, cut = TensorSpec("alone", (2,), "float32"), TensorSpec("cut", (4, 3), "float32")
    parts = [TensorPiece(cut, Box((0, 0), (1, 3))), TensorPiece(cut, Box((2, 0), (2, 3)))]
    assert [piece.path for piece in named_apart([whole_tensor(alone), *parts])] == ["alone", "cut[0, 0]", "cut[2, 0]"]


@pytest.mark.parametrize(("into", "row"), [(24, 0), (40, 1), (88, 1), (104, 2), (120, 2)])
def test_a_cut_is_at_the_nearest_row(into, row):
    tensor = TensorSpec("t", (4, 16), "float32")
    assert module.cut([tensor], [tensor.num_bytes], into) == (0, row)

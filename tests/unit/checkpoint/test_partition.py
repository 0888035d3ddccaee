"""Every row has exactly one writer, and writers have equal shares."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import partition as module
from hpctrain.checkpoint.format.layout import TensorSpec
from hpctrain.checkpoint.format.partition import partition

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=20)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPLIT_BYTES", 64)


@given(shapes, st.integers(1, 9))
def test_every_row_is_written_once_in_order(shapes: list[tuple[int, ...]], writers: int) -> None:
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


@given(shapes, st.integers(1, 9))
def test_shares_are_equal_within_a_row_or_a_small_tensor(shapes: list[tuple[int, ...]], writers: int) -> None:
    tensors = [TensorSpec(f"t{index}", shape, "float32") for index, shape in enumerate(shapes)]
    largest = max([64, *(tensor.row_bytes for tensor in tensors)])
    mean = sum(tensor.num_bytes for tensor in tensors) / writers
    for part in partition(tensors, writers):
        assert abs(sum(piece.num_bytes for piece in part) - mean) <= largest + 1


def test_thousands_of_writers_and_tensors_take_no_time() -> None:
    tensors = [TensorSpec(f"t{index}", (64, 64), "float32") for index in range(5000)]
    assert sum(map(len, partition(tensors, 4096))) >= 5000

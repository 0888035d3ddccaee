"""Which rows of which parameters each rank updates."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backends.torch.strategies.row_shares import ShardedParameter, share_out
from hpctrain.reduce.flat_layout import Layout, plan

shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50)), min_size=1, max_size=12)
ranks = st.integers(1, 9)


def layout_of(shapes: list[tuple[int, int]]) -> Layout:
    return plan([rows * width for rows, width in shapes], None, 16)


@given(shapes, ranks)
def test_every_row_has_one_owner_and_ranges_cover_the_buffer(shapes, ranks):
    layout = layout_of(shapes)
    shares = share_out(layout, [ShardedParameter(rows, 4 * rows * width) for rows, width in shapes], ranks)
    assert [shares.ranges[0].start, shares.ranges[-1].stop] == [0, layout.gradients]
    assert all(one.stop == next_.start for one, next_ in itertools.pairwise(shares.ranges))
    held = [(piece.parameter, row) for piece in shares.pieces for row in range(piece.begin, piece.end)]
    assert sorted(held) == [(index, row) for index, (rows, _) in enumerate(shapes) for row in range(rows)]
    for piece in shares.pieces:
        begin, width = layout.offsets[piece.parameter], shapes[piece.parameter][1]
        own = shares.ranges[piece.owner]
        assert own.start <= begin + piece.begin * width
        assert begin + piece.end * width <= own.stop


@given(shapes, ranks)
def test_shares_are_equal_to_half_a_row_at_either_end(shapes, ranks):
    weighed = [ShardedParameter(rows, 4 * rows * width) for rows, width in shapes]
    shares = share_out(layout_of(shapes), weighed, ranks)
    held = [0] * ranks
    for piece in shares.pieces:
        held[piece.owner] += (piece.end - piece.begin) * 4 * shapes[piece.parameter][1]
    ideal, row = sum(held) / ranks, 4 * max(width for _, width in shapes)
    assert all(abs(own - ideal) <= row for own in held)


@given(shapes, ranks)
def test_what_may_not_be_cut_has_one_owner(shapes, ranks):
    shares = share_out(layout_of(shapes), [ShardedParameter(1, 4 * rows * width) for rows, width in shapes], ranks)
    assert sorted(piece.parameter for piece in shares.pieces) == list(range(len(shapes)))


def test_what_no_optimizer_updates_counts_for_nothing():
    weighed = [ShardedParameter(4, 16), ShardedParameter(100, 0), ShardedParameter(4, 16)]
    shares = share_out(plan([4, 100, 4], None, 0), weighed, 2)
    owned = [
        sum(weighed[piece.parameter].num_bytes for piece in shares.pieces if piece.owner == rank) for rank in (0, 1)
    ]
    assert owned == [16, 16]


def test_more_ranks_than_rows_leave_some_with_nothing():
    shares = share_out(plan([2], None, 0), [ShardedParameter(2, 8)], 5)
    assert [(piece.begin, piece.end) for piece in shares.pieces] == [(0, 1), (1, 2)]
    assert len(shares.ranges) == 5


class Looked(list[ShardedParameter]):
    """Counts how often one of them is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_a_rank_does_not_look_at_all_parameters():
    """Of a hundred thousand ranks and a thousand parameters: minutes, else."""
    weighed = Looked([ShardedParameter(8, 64)] * 500)
    share_out(plan([16] * 500, None, 0), weighed, 1000)
    assert weighed.looks < 10 * (500 + 1000)

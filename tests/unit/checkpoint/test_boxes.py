"""Index arithmetic of parts of tensors, against NumPy's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.format.boxes import Box, boxes_between, everything, run_axis, span, tiling_problem
from tests.support.tilings import boxes_within, shapes, tilings


@settings(deadline=None)
@given(st.data(), shapes)
def test_an_overlap_is_what_both_hold(data, shape):
    one, other = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    counts = np.zeros(shape, int)
    counts[one.index] += 1
    counts[other.index] += 1
    common = one.overlap(other)
    assert common.size == np.count_nonzero(counts == 2)
    assert np.all(counts[common.index] == 2)
    inside = common.seen_from(one.begin)
    numbers = np.arange(counts.size).reshape(shape)
    np.testing.assert_array_equal(numbers[one.index][inside.index], numbers[common.index])


@settings(deadline=None)
@given(st.data(), shapes)
def test_boxes_between_two_places_are_the_elements_there_in_order(data, shape):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    first = data.draw(st.integers(0, numbers.size))
    last = data.draw(st.integers(first, numbers.size))
    boxes = list(boxes_between(shape, first, last))
    found = [number for box in boxes for number in np.ravel(numbers[box.index]).tolist()]
    assert found == list(range(first, last))
    assert all(box.size == span(box, shape)[1] - span(box, shape)[0] for box in boxes), "each is one run of bytes"
    assert len(boxes) <= max(1, 2 * len(shape))


@settings(deadline=None)
@given(st.data(), shapes)
def test_a_tiling_is_accepted_in_any_order_and_nothing_else_is(data, shape):
    boxes = data.draw(tilings(shape).flatmap(st.permutations))
    assert tiling_problem(shape, boxes) is None
    filled = [box for box in boxes if box.size]
    if filled:
        odd = data.draw(st.sampled_from(filled))
        without = [box for box in boxes if box is not odd]
        assert tiling_problem(shape, without) == "parts are missing"
        assert tiling_problem(shape, [*boxes, odd]) == "parts overlap"
        other = data.draw(boxes_within(shape))  # as many elements, at another place
        if other.size == odd.size and other != odd:
            assert tiling_problem(shape, [*without, other]) == "parts overlap"


def test_thousands_of_parts_take_no_time():
    shape = (2048, 2048)
    columns = [Box((0, column), (2048, 1)) for column in range(2048)]
    grid = [Box((row, column), (32, 32)) for row in range(0, 2048, 32) for column in range(0, 2048, 32)]
    for boxes in (columns, grid, [everything(shape)]):
        assert tiling_problem(shape, boxes) is None
    assert tiling_problem(shape, [*columns[1:], columns[7]]) == "parts overlap"


@pytest.mark.parametrize(
    ("part", "axis"), [((2, 3, 5), 0), ((4, 3, 5), 0), ((4, 2, 5), 1), ((4, 3, 2), 2), ((4, 1, 2), 2)]
)
def test_a_box_lies_in_a_row_from_the_last_axis_that_it_has_in_part(part, axis):
    assert run_axis(Box((0, 0, 0), part), (4, 3, 5)) == axis
    assert run_axis(Box((1,), (2,)), (5,)) == run_axis(Box((), ()), ()) == 0

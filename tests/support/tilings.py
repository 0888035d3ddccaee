"""Hypothesis strategies: random parts of arrays, and random tilings of arrays."""

from __future__ import annotations

from hypothesis import strategies as st

from hpctrain.checkpoint.format.boxes import Box, everything

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A random part of an array; its lengths may be 0."""
    ends = [sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length)))) for length in shape]
    return Box(tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Parts that contain each element exactly once, cut along any axes; some may be empty."""
    boxes = [everything(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        for begin, end in ((0, at), (at, box.shape[axis])):
            first = tuple(each + begin * (number == axis) for number, each in enumerate(box.begin))
            count = tuple(end - begin if number == axis else each for number, each in enumerate(box.shape))
            boxes.append(Box(first, count))
    return boxes

"""Which values of an array a virtual dataset takes, as boxes: a range of indices along each axis."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import h5py
import numpy as np

Box = tuple[range, ...]
"""Ascending indices along each axis, at least one along the first."""


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(indices.start, indices.stop, indices.step) for indices in box)


def boxes_of(space: h5py.h5s.SpaceID, shape: tuple[int, ...]) -> list[Box]:
    """A selection as boxes that follow each other along the first axis, or nothing if it is none of these."""
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return [tuple(map(range, shape))]
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or space.get_simple_extent_ndims() != len(shape):
        return []
    if space.is_regular_hyperslab():
        axes = map(progression, *space.get_regular_hyperslab(), shape)
        box = tuple(indices for indices in axes if indices is not None)
        if len(box) == len(shape):
            return [box]
    blocks = np.array(space.get_select_hyper_blocklist(), dtype=np.int64)  # [blocks, first and last, axes]
    blocks = blocks[np.argsort(blocks[:, 0, 0], kind="stable")]
    if (blocks[:, :, 1:] != blocks[:1, :, 1:]).any() or (blocks[1:, 0, 0] <= blocks[:-1, 1, 0]).any():
        return []
    others = [range(first, last + 1) for first, last in blocks[0, :, 1:].T.tolist()]
    return [(range(first, last + 1), *others) for first, last in blocks[:, :, 0].tolist()]


def aligned(targets: list[Box], sources: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Two selections as pairs of boxes with the same number of samples, as far as both go."""
    if len(targets) == len(sources) == 1:
        yield targets[0], sources[0]
        return
    sides = deque(targets), deque(sources)
    while all(sides):
        count = min(len(side[0][0]) for side in sides)
        target, source = (side.popleft() for side in sides)
        yield (target[0][:count], *target[1:]), (source[0][:count], *source[1:])
        for side, (rows, *others) in zip(sides, (target, source), strict=True):
            if rows[count:]:
                side.appendleft((rows[count:], *others))


def progression(start: int, stride: int, count: int, block: int, size: int) -> range | None:
    """What a hyperslab selects along one axis of this size, or None if that is not evenly spaced."""
    endless = h5py.h5s.UNLIMITED
    if block == 1 and count > 1 and stride > 1:
        return range(start, size if count == endless else start + stride * (count - 1) + 1, stride)
    if endless in (count, block):
        return range(start, size) if count == 1 or stride == block else None
    return range(start, start + count * block) if count == 1 or stride == block else None


def beyond(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is not within an array of this shape."""
    return any(indices and indices[-1] >= size for indices, size in zip(box, shape, strict=True))

"""Small tensors on which an optimizer is tried, and how they are cut. Pure."""

from __future__ import annotations

import itertools

STEPS = 3
LARGEST_SIZE = 160
"""Of an axis that is tried: beyond 128, where some optimizers begin to treat tensors in another way."""
LARGEST_TENSOR = 3 << 13
"""Elements of a tensor that is tried, and so milliseconds."""
LEAST_RATE = 1e-3
"""In place of a learning rate of 0, with which nothing would happen."""


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape like it, of no more than some thousand elements."""
    inner, elements = [], 1
    for size in shape[1:]:
        inner.append(max(1, min(size, LARGEST_SIZE, LARGEST_TENSOR // elements // 2)))
        elements *= inner[-1]
    return (min(shape[0], max(2, LARGEST_TENSOR // elements)), *inner) if shape else ()


def rows_of(shape: tuple[int, ...]) -> list[slice]:
    """Uneven parts of the first axis, the first of them one row; one part of what has no two rows."""
    rows = shape[0] if shape else 1
    ends = sorted({0, min(1, rows), rows // 2, rows})
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)] if rows > 1 else [slice(None)]

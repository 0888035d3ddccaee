"""Where each gradient lies in the one flat buffer that is exchanged, and which parts of it travel together.

Pure index arithmetic, fixed by the model alone: sums are formed in the same order in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements: each gradient begins on a cache line of 64 bytes, so that kernels run on aligned vectors."""


@dataclass(frozen=True)
class Bucket:
    """Neighbouring gradients that are sent in one message."""

    begin: int
    """First element in the flat buffer."""
    end: int
    """One past the last element; includes padding and, for the last bucket, the extra slots."""
    members: tuple[int, ...]
    """Indices of its parameters."""


@dataclass(frozen=True)
class Layout:
    """A flat buffer: gradients in reverse parameter order (backward ends with the first layers), then extra slots."""

    offsets: tuple[int, ...]
    """First element of each parameter's gradient, by parameter index."""
    sizes: tuple[int, ...]
    """Elements of each parameter, by parameter index."""
    buckets: tuple[Bucket, ...]
    """In the order in which they are sent; together they cover the buffer."""
    gradients: int
    """Elements of all gradients with their padding; the extra slots begin here."""
    length: int
    """Elements of the whole buffer."""


def plan(sizes: Sequence[int], bucket_elements: int | None, extra: int) -> Layout:
    """Lays out gradients of these sizes (elements, in parameter order).

    Args:
        sizes: elements of each parameter.
        bucket_elements: a bucket is closed once it holds this many elements; None puts everything into one.
        extra: slots behind the gradients for sums that travel along.
    """
    offsets = [0] * len(sizes)
    buckets: list[Bucket] = []
    members: list[int] = []
    begin = end = 0
    for index in reversed(range(len(sizes))):
        offsets[index] = end
        end += -(-sizes[index] // ALIGNMENT) * ALIGNMENT
        members.append(index)
        if bucket_elements is not None and end - begin >= bucket_elements:
            buckets.append(Bucket(begin, end, tuple(members)))
            begin, members = end, []
    if members or not buckets:
        buckets.append(Bucket(begin, end + extra, tuple(members)))
    else:  # the extra slots ride with the last bucket
        last = buckets.pop()
        buckets.append(Bucket(last.begin, end + extra, last.members))
    return Layout(tuple(offsets), tuple(sizes), tuple(buckets), end, end + extra)


def slices(length: int, parts: int) -> list[slice]:
    """Contiguous, aligned slices of nearly equal size that cover a buffer, one a rank."""
    step = -(-length // (parts * ALIGNMENT)) * ALIGNMENT
    return [slice(min(part * step, length), min((part + 1) * step, length)) for part in range(parts)]

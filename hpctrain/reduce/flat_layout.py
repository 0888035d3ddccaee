"""Plans the flat buffer that is exchanged: where each gradient is, which parts are sent together, and the extra
slots, which carry a few numbers in the same message without additional latency.

Pure index arithmetic that depends only on the model, so sums are formed in the same order in every run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements: each gradient begins on a 64-byte cache line, so that kernels run on aligned vectors."""


@dataclass(frozen=True)
class Bucket:
    """Adjacent gradients that are sent in one message."""

    begin: int
    """First element in the flat buffer."""
    end: int
    """One past the last element; includes padding and, for the last bucket, the extra slots."""
    members: tuple[int, ...]
    """Indices of its parameters."""


BUCKET_BYTES, GPU_BUCKET_BYTES, END_BYTES = 8 * 2**20, 25 * 2**20, 2**20
"""Default sizes of buckets: on CPUs, on GPUs, and of the first and last one on GPUs: the first is sent early, and
backward does not hide the last."""


@dataclass(frozen=True)
class Layout:
    """A flat buffer: gradients in reverse parameter order (backward ends with the first layers), then extra slots."""

    offsets: tuple[int, ...]
    """First element of each parameter's gradient, by parameter index."""
    sizes: tuple[int, ...]
    """Elements of each parameter, by parameter index."""
    buckets: tuple[Bucket, ...]
    """Buckets in sending order; together they cover the buffer."""
    gradients: int
    """Elements of all gradients including padding; the extra slots begin here."""
    length: int
    """Elements of the whole buffer."""
    apart: tuple[int, ...] = ()
    """Indices of parameters whose gradients are sent alone, in the order of their places."""

    def messages(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Divides this part of the buffer, some whole gradients, into those sent alone and what lies between them."""
        found = []
        for index in self.apart:
            first = self.offsets[index]
            if begin <= first < end:
                found += [(begin, first), (first, first + self.sizes[index])]
                begin = first + aligned(self.sizes[index])
        return [(first, last) for first, last in [*found, (begin, end)] if first < last]


def plan(
    sizes: Sequence[int],
    bucket_elements: int | None,
    extra: int,
    end_elements: int | None = None,
    apart_elements: float = math.inf,
) -> Layout:
    """Lays out gradients of these sizes (elements, in parameter order).

    Args:
        sizes: elements of each parameter.
        bucket_elements: a bucket is closed once it holds this many elements; None puts everything into one.
        extra: number of slots after the gradients, for numbers summed in the same message.
        end_elements: the same as ``bucket_elements`` for the first and the last bucket; None treats them as others.
        apart_elements: gradients of as many elements are sent alone; they are the first ones of their buckets.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    begin = end = 0
    length = sum(map(aligned, sizes))
    first = bucket_elements if end_elements is None else end_elements
    last_from = length if end_elements is None else length - end_elements
    for index in reversed(range(len(sizes))):
        end += aligned(sizes[index])
        members.append(index)
        if bucket_elements is None or first is None:
            continue
        if end - begin >= (bucket_elements if begin else first) or begin < last_from <= end < length:
            buckets.append(Bucket(begin, end, tuple(members)))
            begin, members = end, []
    if members or not buckets:
        buckets.append(Bucket(begin, end + extra, tuple(members)))
    else:  # the extra slots go with the last bucket
        last = buckets.pop()
        buckets.append(Bucket(last.begin, end + extra, last.members))
    apart = {index for index, size in enumerate(sizes) if size >= apart_elements}
    order = [index for bucket in buckets for index in sorted(bucket.members, key=lambda one: one not in apart)]
    ends = itertools.accumulate(aligned(sizes[index]) for index in order)
    offsets = [end - aligned(sizes[index]) for index, end in sorted(zip(order, ends, strict=True))]
    first_ones = tuple(index for index in order if index in apart)
    return Layout(tuple(offsets), tuple(sizes), tuple(buckets), end, end + extra, first_ones)


def aligned(size: int) -> int:
    """A size rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def slices(length: int, parts: int) -> list[slice]:
    """Contiguous, aligned slices of nearly equal size that cover a buffer, one per rank."""
    step = -(-length // (parts * ALIGNMENT)) * ALIGNMENT
    return [slice(min(part * step, length), min((part + 1) * step, length)) for part in range(parts)]


SLOTS = 16
"""Extra slots: one cache line."""
LOSS, WEIGHT, WEIGHTED, SQUARE = 0, 1, 2, 3
"""Index of each number in the slots. SQUARE is not sent: some sums fill in the squared L2 norm of their result."""


@dataclass(frozen=True)
class ExchangeResult:
    """What an exchange gives all ranks besides the gradients.

    A mean loss contributes ``mean * local_samples / global_samples`` on each rank and its gradients likewise. A
    (sum, weight) loss contributes both divided by ``global_samples``, and gradients must be divided by ``divisor``
    after the exchange.
    """

    loss: float
    """Mean loss over the global batch."""
    divisor: float
    """What to divide the summed gradients by; 1 for mean losses, and if all weights are zero."""


def read_slots(slots: Sequence[float]) -> ExchangeResult:
    """Reads the summed slots. A rank without samples contributes zeros and learns the kind of loss from the others."""
    if slots[WEIGHTED] and slots[WEIGHT]:
        return ExchangeResult(slots[LOSS] / slots[WEIGHT], slots[WEIGHT])
    return ExchangeResult(slots[LOSS], 1.0)

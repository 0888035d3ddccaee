"""Where each gradient lies in the one flat buffer that is exchanged, which parts of it travel together, and the few
numbers in the extra slots of the same message, which cost no latency.

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


SLOTS = 16
"""Extra slots: one cache line."""
LOSS, WEIGHT, WEIGHTED, SQUARE = 0, 1, 2, 3
"""Index of each number among the slots. SQUARE does not travel: sums that promise it fill in the square of the L2 norm
of the summed gradients."""


@dataclass(frozen=True)
class ExchangeResult:
    """What all ranks together know after an exchange.

    A mean loss contributes ``mean * local_samples / global_samples`` on each rank and its gradients likewise. A
    (sum, weight) loss contributes both divided by ``global_samples``, and gradients must be divided by ``divisor``
    after the exchange.
    """

    loss: float
    """Mean loss over the global batch."""
    divisor: float
    """What the summed gradients are to be divided by: 1 for mean losses and if all weights are zero."""


def read_slots(slots: Sequence[float]) -> ExchangeResult:
    """Reads the summed slots. A rank without samples leaves its slots at zero and learns the kind from the others."""
    if slots[WEIGHTED] and slots[WEIGHT]:
        return ExchangeResult(slots[LOSS] / slots[WEIGHT], slots[WEIGHT])
    return ExchangeResult(slots[LOSS], 1.0)

"""Large gradients that are summed from where autograd left them, without a copy into the flat tensor first."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

from torch import Tensor

from hpctrain.reduce.flat_layout import Layout


class LentGradients:
    """Sums of Horovod may have other memory for their terms than for their result, which is the flat tensor.

    Args:
        layout: layout of the flat tensor.
        least: elements of the smallest gradient that is worth it: those of a message.
    """

    def __init__(self, layout: Layout, least: int) -> None:
        pairs = zip(layout.offsets, layout.sizes, strict=True)
        self.places = sorted((begin, begin + size) for begin, size in pairs if size >= least)
        self.held: dict[int, Tensor] = {}
        """This update's gradients in one dimension, by their first element in the flat tensor."""

    def lend(self, begin: int, gradient: Tensor, view: Tensor) -> bool:
        """Keeps the gradient that belongs at ``begin``, in memory order as ``view`` there; returns whether it does."""
        same = gradient.dtype == view.dtype and gradient.stride() == view.stride() and not gradient.is_complex()
        if not same or (begin, begin + gradient.numel()) not in self.places:
            return False
        self.held[begin] = gradient.as_strided((gradient.numel(),), (1,))
        return True

    def put_back(self, begin: int, view: Tensor) -> None:
        """Copies the gradient that belongs at ``begin``, if it was lent, into ``view`` there: more is to be added."""
        if (gradient := self.held.pop(begin, None)) is not None:
            view.copy_(gradient.as_strided(view.size(), view.stride()))

    def terms(self, begin: int, message: Tensor) -> Tensor:
        """What this rank adds to the message that begins at ``begin``.

        Within a large gradient it never is the message itself, even if this rank has lent nothing: MPI wants all ranks
        to sum in place, or none.
        """
        end = begin + len(message)
        nearest = bisect_right(self.places, begin, key=itemgetter(1))
        beyond = bisect_left(self.places, end, key=itemgetter(0))
        for first, last in self.places[nearest:beyond]:
            gradient = self.held.get(first)
            if first <= begin and end <= last:
                return message.clone() if gradient is None else gradient[begin - first : end - first]
            if gradient is not None:
                both = slice(max(first, begin), min(last, end))
                part = gradient[both.start - first : both.stop - first]
                message[both.start - begin : both.stop - begin].copy_(part)
        return message

    def give_back(self) -> None:
        """Lets all gradients go: they are summed, or the update has been given up."""
        self.held.clear()

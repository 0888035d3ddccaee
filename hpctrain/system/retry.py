"""The one loop that tries again what another machine serves: a store, a file server, a scheduler's controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def retried(
    begin: Callable[[], Iterable[T]], again: type[E], pauses_s: Iterable[float], pause: Callable[[float, E], object]
) -> Iterator[T]:
    """Yields the items of an iterable, which is begun again after an error, without the items that it gave before.

    Args:
        begin: returns the iterable; its items are the same each time.
        again: the errors that pass.
        pauses_s: seconds before each further try; they start over once an item came.
        pause: pause(seconds, error) waits, and may raise another error.
    """
    done, left = 0, iter(pauses := tuple(pauses_s))
    while True:
        try:
            for item in islice(begin(), done, None):
                yield item
                done, left = done + 1, iter(pauses)
            return
        except again as error:
            pause_s = next(left, None)
            if pause_s is None:
                raise
            pause(pause_s, error)


def retry(call: Callable[[], T], again: type[E], pauses_s: Iterable[float], pause: Callable[[float, E], object]) -> T:
    """Calls ``call`` until it does not raise ``again``; returns its result. See ``retried``."""
    return next(retried(lambda: map(lambda one: one(), [call]), again, pauses_s, pause))

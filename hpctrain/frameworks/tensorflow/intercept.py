"""Every ``apply`` of a Keras optimizer while a function runs, seen from outside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

Apply = Callable[[Any, Any], None]
"""apply(gradients, variables) of one optimizer."""


@contextlib.contextmanager
def intercepted(handle: Callable[[keras.optimizers.Optimizer, Apply, Any, Any], None]) -> Iterator[None]:
    """In the body, ``optimizer.apply(gradients, variables)`` is ``handle(optimizer, apply, gradients, variables)``.

    It is the classes that are changed, and changed back at the end: so no optimizer escapes, wherever it is kept. What
    an optimizer applies inside of its own ``apply``, by other optimizers or by its base class, is left alone.
    """
    inside = False

    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def apply(self: keras.optimizers.Optimizer, grads: Any, trainable_variables: Any = None) -> None:
            nonlocal inside
            if inside:
                original(self, grads, trainable_variables)
                return
            inside = True
            try:
                handle(self, functools.partial(original, self), grads, trainable_variables)
            finally:
                inside = False

        return apply

    originals = {cls: vars(cls)["apply"] for cls in family(keras.optimizers.Optimizer) if "apply" in vars(cls)}
    for cls, original in originals.items():
        cls.apply = replacement(original)
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.apply = original


def family(cls: type) -> set[Any]:
    """A class, those that it is derived from, and all that are derived from it."""
    found: set[Any] = set(cls.__mro__)
    waiting: list[Any] = [cls]
    while waiting:
        more = waiting.pop().__subclasses__()
        waiting += more
        found.update(more)
    return found

"""Whether a value that was read from JSON is of the types that its reader takes for granted.

A shape is written as the values are: ``{"rank": int, "hosts": [str], "host": (str, None), "seconds": {str: float}}``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

Fits = Callable[[object], bool]
Shape = Any
"""int, float (any finite number), str, bool, None; dict, list (of anything); [shape]; {str: shape}; {"key": shape},
in which it may be missing and others may stand beside it; (one, other) for any of these; a function that decides."""

LARGEST = 2**63
"""Whole numbers beyond are of no use, and overflow arrays."""
LATEST = 1e11
"""Unix seconds that calendars know."""


def is_whole(value: object) -> bool:
    """A whole number of at most 64 bits; true and false are none."""
    return type(value) is int and -LARGEST <= value < LARGEST


def is_number(value: object) -> bool:
    """A finite number that arithmetic can do with."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_count(value: object) -> bool:
    """A whole number from 0."""
    return is_whole(value) and value >= 0  # type: ignore[operator]


def is_time(value: object) -> bool:
    """Unix seconds."""
    return is_number(value) and 0 <= value < LATEST  # type: ignore[operator]


def fits(shape: Shape) -> Fits:
    """The function that says whether a value has a shape."""
    if shape in (int, float):
        return is_whole if shape is int else is_number
    if shape is None or isinstance(shape, type):
        kind = type(None) if shape is None else shape
        return lambda value: type(value) is kind
    if isinstance(shape, tuple):
        return functools.reduce(_either, map(fits, shape))
    if isinstance(shape, list):
        (item,) = map(fits, shape)
        return lambda value: type(value) is list and all(map(item, value))
    if isinstance(shape, dict):
        if str in shape:
            item = fits(shape[str])
            return lambda value: type(value) is dict and all(map(item, value.values()))
        wrong = misfit(shape)
        return lambda value: type(value) is dict and wrong(value) is None
    told: Fits = shape
    return told


def _either(one: Fits, other: Fits) -> Fits:
    return lambda value: one(value) or other(value)


def typed(shape: Shape) -> Callable[[Any], Any]:
    """The function that gives back a value which has the shape, and None for any other."""
    right = fits(shape)
    return lambda value: value if right(value) else None


def without_misfits(shape: dict[str, Shape]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function that leaves the keys out of a mapping whose values have another shape."""
    checks = {key: fits(each) for key, each in shape.items()}
    return lambda value: {key: each for key, each in value.items() if key not in checks or checks[key](each)}


def misfit(shape: dict[str, Shape]) -> Callable[[dict[str, Any]], str | None]:
    """The function that names a mapping's first key whose value has another shape; None if all fit."""
    checks = {key: fits(each) for key, each in shape.items()}

    def first(value: dict[str, Any]) -> str | None:
        for key, check in checks.items():
            if key in value and not check(value[key]):
                return key
        return None

    return first

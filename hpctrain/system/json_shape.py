"""Checks that values read from JSON have the types that their reader expects.

A shape looks like the value: ``{"rank": int, "hosts": [str], "host": (str, None), "seconds": {str: float}}``. ``maker``
reads dataclasses by the types of their fields; ``flat`` flattens nested keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import UnionType

T = typing.TypeVar("T")
Fits = Callable[[object], bool]
Reads = Callable[[typing.Any], typing.Any]
"""Converts a value from JSON, or raises ValueError."""
Shape = typing.Any
"""int, float (any finite number), str, bool, None; dict, list (of anything); [shape]; {str: shape}; {"key": shape}, in
which keys may be missing and others are allowed; (one, other) for alternatives; or a predicate."""

LARGEST = 2**63
"""Bound of integers: larger ones would overflow arrays."""
LATEST = 1e11
"""Largest Unix time in seconds that calendars support."""


def is_whole(value: object) -> bool:
    """Whether it is an integer of at most 64 bits; bools are not."""
    return type(value) is int and -LARGEST <= value < LARGEST


def is_number(value: object) -> bool:
    """Whether it is a finite number; integers must fit 64 bits."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_count(value: object) -> bool:
    """Whether it is an integer of at least 0."""
    return is_whole(value) and value >= 0  # type: ignore[operator]


def is_time(value: object) -> bool:
    """Whether it is a Unix time in seconds."""
    return is_number(value) and 0 <= value < LATEST  # type: ignore[operator]


def fits(shape: Shape) -> Fits:
    """Returns the function that checks whether a value has a shape."""
    if shape in (int, float):
        return is_whole if shape is int else is_number
    if shape is None or isinstance(shape, type):
        kind = type(None) if shape is None else shape
        return lambda value: type(value) is kind
    if isinstance(shape, tuple):
        return functools.reduce(lambda one, other: lambda value: one(value) or other(value), map(fits, shape))
    if isinstance(shape, list):
        (item,) = map(fits, shape)
        return lambda value: type(value) is list and all(map(item, value))
    if isinstance(shape, dict):
        if str in shape:
            item = fits(shape[str])
            return lambda value: type(value) is dict and all(map(item, value.values()))
        fields = {key: fits(each) for key, each in shape.items()}
        return lambda value: type(value) is dict and all(fields[key](value[key]) for key in fields.keys() & value)
    predicate: Fits = shape
    return predicate


def sound(shape: Shape) -> Reads:
    """Returns the function that returns a value of this shape and raises ValueError for any other."""
    right = fits(shape)

    def checked(value: typing.Any) -> typing.Any:
        if not right(value):
            raise ValueError("it is of another type")
        return value

    return checked


def without_misfits(fields: Mapping[str, Reads]) -> Callable[[dict[str, typing.Any]], dict[str, typing.Any]]:
    """Returns the function that drops keys of a mapping whose values cannot be read; null values are kept."""

    def is_sound(key: str, value: typing.Any) -> bool:
        try:
            fields[key](value)
        except ValueError:
            return False
        return True

    return lambda found: {
        key: value for key, value in found.items() if value is None or key not in fields or is_sound(key, value)
    }


def maker(kind: type[T], **own: Reads) -> Callable[[typing.Any], T]:
    """Returns the function that makes a dataclass from a JSON object.

    It raises ValueError if a field has the wrong type, or is missing without a default. Null counts as missing; a field
    that can be None may be missing. Unknown keys are ignored.

    Args:
        kind: the dataclass.
        own: readers of some fields, which replace those by type.
    """
    fields = fields_of(kind, **own)
    an_object = sound(dict)
    hints = typing.get_type_hints(kind)
    nothing = {name: None for name in fields if type(None) in typing.get_args(hints[name]) and not hasattr(kind, name)}

    def make(value: typing.Any) -> T:
        found = an_object(value)
        given = {name: read(found[name]) for name, read in fields.items() if found.get(name) is not None}
        try:
            return kind(**{**nothing, **given})
        except TypeError as error:
            raise ValueError(str(error)) from error

    return make


def fields_of(kind: typing.Any, **own: Reads) -> dict[str, Reads]:
    """Readers of a dataclass's fields for values that are not null: from ``own``, or by type."""
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    bare = {
        name: typing.get_args(hints[name])[0] if typing.get_origin(hints[name]) is UnionType else hints[name]
        for name in names
    }
    return {name: own[name] if name in own else _reading(hint) for name, hint in bare.items()}


def _reading(hint: typing.Any) -> Reads:
    """Reader of a type: int (at least 0), float, str, bool, a sequence or mapping of these, a dataclass, an enum of
    strings, or one of these or None. An enum with a ``read`` method maps unknown strings itself."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is UnionType:
        inner = _reading(arguments[0])
        return lambda value: None if value is None else inner(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner, an_object = _reading(arguments[1]), sound(dict)
        return lambda value: {key: inner(each) for key, each in an_object(value).items()}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        inner, a_list = _reading(arguments[0]), sound((list, tuple))
        return lambda value: tuple(map(inner, a_list(value)))
    if dataclasses.is_dataclass(hint):
        return maker(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        make = getattr(hint, "read", hint)
        a_text = sound(lambda value: isinstance(value, str))
        return lambda value: make(a_text(value))
    return sound(is_count if hint is int else hint)


def flat(section: Mapping[str, typing.Any], prefix: str = "") -> dict[str, typing.Any]:
    """Flattens nested mappings to dotted keys; tuples become lists, as in JSON."""
    result: dict[str, typing.Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = list(value) if isinstance(value, tuple) else value
    return result


def finite(value: typing.Any, instead: str | None) -> typing.Any:
    """Replaces numbers that JSON cannot represent, NaN and infinity, in a nested value."""
    if isinstance(value, Mapping):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, instead) for item in value]
    return instead if isinstance(value, float) and not math.isfinite(value) else value

"""A section of the run file: a frozen dataclass whose types have ranges of numbers, and mark what results depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform, get_args, get_type_hints

from hpctrain.errors import UserError


class WrongValue(UserError):
    """A key of the run file has a value that it does not take."""

    def __init__(self, key: str, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.key = key
        """The key, dotted; of several that cannot be combined, the first."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.what, self.fix)


@dataclass(frozen=True)
class Range:
    """Numbers that a key takes, as part of its type."""

    least: float | None = None
    above: float | None = None
    most: float | None = None

    def check(self, key: str, value: float | None) -> None:
        """Raises WrongValue for a value that is out of range, or not a number (NaN)."""
        if value is None:
            return
        fix = None
        if self.least is not None and not value >= self.least:
            fix = f"give {self.least} or more"
        elif self.above is not None and not value > self.above:
            fix = f"give a number above {self.above}"
        elif self.most is not None and value > self.most:
            fix = f"give {self.most} or less"
        if fix is not None:
            raise WrongValue(key, f"{key} is {value}", fix)


Positive = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
AboveZero = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(above=0, most=1)]

Value = TypeVar("Value")
DECIDES = "results depend on it"
Decisive = Annotated[Value, DECIDES]
"""Type of a key, or of a section, that changes what is computed: a resumed run must have the same value. An earlier
version that lacks the key computed what its default does."""


def marks(hint: Any) -> Iterator[object]:
    """What a type, or a part of it, is annotated with."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from marks(part)


@dataclass_transform(frozen_default=True)
class Section:
    """A part of the run file, a frozen dataclass, whose numbers are in the ranges that their types name."""

    _key: ClassVar[str]
    """Of the section in the run file; empty for the whole file."""
    _ranges: ClassVar[Mapping[str, Range]]
    """By field: of its type, or of the items of a tuple."""
    _decisive: ClassVar[tuple[str, ...]]
    """Keys on which results depend, dotted."""

    def __init_subclass__(cls, key: str) -> None:
        cls._key = key
        hints = get_type_hints(cls, include_extras=True).items()
        found = [(name, mark) for name, hint in hints for mark in marks(hint)]
        cls._ranges = {name: mark for name, mark in found if isinstance(mark, Range)}
        cls._decisive = tuple(f"{key}.{name}".lstrip(".") for name, mark in found if mark == DECIDES)
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        for name, allowed in self._ranges.items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                allowed.check(f"{self._key}.{name}".lstrip("."), number)


def is_given(value: object) -> bool:
    """Whether a key has a value: 0 is one."""
    return value not in (None, "", (), [])
